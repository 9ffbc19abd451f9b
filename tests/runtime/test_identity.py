"""The key file is read only if no other user could have read or made it, and no error or text shows what is in it."""

from __future__ import annotations

import base64
import os
import pickle
import re
import ssl
import subprocess
import sys
import traceback
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from identities import identity
from leaks import open_files

from aiodaft._runtime.connections.identity import (
    Identity,
    find_key_file,
    load_identity,
    receive_identity,
    write_key_file,
)
from aiodaft.cli.key import new_certificate
from aiodaft.exceptions import KeyFileError

SECRET = bytes(range(65, 97))
SPELLINGS = [SECRET, SECRET.hex().encode(), base64.b64encode(SECRET), repr(SECRET).encode()]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "key"
    write_key_file(path, SECRET, *new_certificate())
    return path


def refused(path: Path, why: str) -> None:
    with pytest.raises(KeyFileError, match=f"the key file {re.escape(str(path))} .*{why}") as raised:
        load_identity(path)
    shown = "".join(traceback.format_exception(raised.value)).encode()
    assert [one for one in SPELLINGS if one in shown] == []


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def test_a_key_file_is_for_its_user_alone(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o7777 == 0o600
    assert key_file.parent.stat().st_mode & 0o7777 == 0o700
    assert load_identity(key_file).key.secret() == SECRET


def test_a_mask_of_any_kind_leaves_a_key_file_to_its_user_alone(tmp_path: Path) -> None:
    for mask in (0o000, 0o077, 0o777):
        before = os.umask(mask)
        try:
            write_key_file(tmp_path / f"{mask:o}", SECRET, *new_certificate())
        finally:
            os.umask(before)
        assert (tmp_path / f"{mask:o}").stat().st_mode & 0o7777 == 0o600


def test_a_key_is_never_overwritten_and_no_link_is_followed(key_file: Path, tmp_path: Path) -> None:
    before = key_file.read_bytes()
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "target")
    for path in (key_file, dangling):
        with pytest.raises(KeyFileError, match=f"{re.escape(str(path))} exists: a key is never overwritten"):
            write_key_file(path, SECRET, *new_certificate())
    assert key_file.read_bytes() == before
    assert not (tmp_path / "target").exists()


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyFileError, match="cannot be made"):
        write_key_file(tmp_path / "file" / "key", SECRET, *new_certificate())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_f83_a_file_that_others_may_use_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    refused(key_file, f"mode {mode:04o}.*`chmod 600` it")


def test_a_file_that_only_its_user_may_read_is_fine(key_file: Path) -> None:
    key_file.chmod(0o400)
    assert load_identity(key_file).key.secret() == SECRET


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused_also_behind_a_link(key_file: Path, tmp_path: Path) -> None:
    os.chown(key_file, 12345, 12345)
    link = tmp_path / "link"
    link.symlink_to(key_file)
    for path in (key_file, link):
        refused(path, f"belongs to user 12345, and this process is of user {os.geteuid()}")


def test_the_file_behind_a_link_is_judged_and_not_the_link(key_file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(key_file)
    assert load_identity(link).key.secret() == SECRET
    key_file.chmod(0o644)
    refused(link, "mode 0644")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path, fifo: Path) -> None:
    for path, why in ((fifo, "no regular file"), (Path("/dev/zero"), "no regular file"), (tmp_path, "no regular file")):
        refused(path, why)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused(loop, "cannot be read")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    refused(tmp_path / "none", "cannot be read: No such file.*`aiodaft key new .*AIODAFT_KEY_FILE")


@pytest.mark.parametrize("nbytes", [0, 31, 33, 64])
def test_f83_a_key_of_another_size_is_refused(key_file: Path, nbytes: int) -> None:
    shorter = base64.b64encode((SECRET * 2)[:nbytes]) or b"===="
    changed(key_file, lambda content: content.replace(base64.b64encode(SECRET), shorter))
    refused(key_file, f"its key has {nbytes} bytes, not 32")


def test_f83_what_is_no_key_file_is_refused(key_file: Path) -> None:
    whole = key_file.read_bytes()
    for content in (b"", SECRET, whole[:-1], whole[:400], whole + b"x", whole[100:], whole.replace(b"AIODAFT", b"X")):
        key_file.write_bytes(content)
        refused(key_file, "none that `aiodaft key new` made, or not all of it")
    key_file.write_bytes(whole * 20)
    refused(key_file, "a key file has about 1,000")


def test_a_damaged_certificate_or_private_key_is_refused(key_file: Path) -> None:
    whole = key_file.read_bytes()
    _, other_key = new_certificate()
    own_key = whole[whole.index(b"-----BEGIN PRIVATE KEY") :]
    for content in (
        whole.replace(own_key, other_key),
        whole.replace(b"CERTIFICATE-----\nMII", b"CERTIFICATE-----\nAAA"),
        whole.replace(b"PRIVATE KEY-----\nMI", b"PRIVATE KEY-----\nAA"),
        whole.replace(b"PRIVATE KEY-----\nMI", b"PRIVATE KEY-----\nA"),
    ):
        key_file.write_bytes(content)
        refused(key_file, "its certificate or private key is damaged")


def test_a_given_path_comes_first_then_the_variable_then_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_key_file("a", {"AIODAFT_KEY_FILE": "b"}) == Path("a")
    assert find_key_file(Path("a"), {}) == Path("a")
    assert find_key_file(None, {"AIODAFT_KEY_FILE": "b"}) == Path("b")
    assert find_key_file(None, {"AIODAFT_KEY_FILE": ""}) == find_key_file(None, {}) == tmp_path / ".config/aiodaft/key"


def test_an_identity_travels_as_bytes_and_is_shown_nowhere(key_file: Path) -> None:
    found = load_identity(key_file)
    copy = Identity(found.packed())
    assert (copy.key.secret(), copy.certificate) == (SECRET, found.certificate)
    shown = f"{found!r} {found} {[found]}".encode()
    assert [one for one in SPELLINGS if one in shown] == []
    assert found.key.cluster.hex()[:12].encode() in shown
    with pytest.raises(TypeError, match="is not pickled"):
        pickle.dumps(found)


def test_both_ends_of_a_connection_show_the_certificate_and_leave_no_file() -> None:
    before = sorted(open_files().values())
    found = Identity(identity().packed())
    for context in (found.server_context, found.client_context):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.cert_store_stats()["x509"] == 1
    assert sorted(open_files().values()) == before


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environ}
    return subprocess.run(
        [sys.executable, "-m", "aiodaft.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=environment,
    )


def test_the_command_makes_a_key_once_and_shows_nothing_of_it(tmp_path: Path) -> None:
    made = command("key", "new", HOME=str(tmp_path), AIODAFT_KEY_FILE="")
    path = tmp_path / ".config" / "aiodaft" / "key"
    secret = load_identity(path).key.secret()
    assert (made.returncode, made.stderr) == (0, "")
    assert f"{path}: the key of cluster" in made.stdout
    again = command("key", "new", str(path))
    assert (again.returncode, again.stdout) == (1, "")
    assert "exists: a key is never overwritten" in again.stderr
    for shown in (made.stdout, again.stderr):
        assert secret.hex() not in shown
        assert base64.b64encode(secret).decode() not in shown
    assert load_identity(path).key.secret() == secret


def test_two_keys_are_of_two_clusters(tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "two"]
    assert [command("key", "new", str(path)).returncode for path in keys] == [0, 0]
    one, two = map(load_identity, keys)
    assert one.key.cluster != two.key.cluster
    assert one.certificate != two.certificate


def test_the_command_says_which_package_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiodaft.cli import key

    monkeypatch.setitem(sys.modules, "cryptography", None)
    ended = CliRunner().invoke(key.new_key, [str(tmp_path / "key")])
    assert ended.exit_code == 1
    assert "pip install 'aiodaft[cluster]'" in ended.stderr
    assert not (tmp_path / "key").exists()


def test_a_key_comes_over_a_pipe_that_stays_open(key_file: Path) -> None:
    content = load_identity(key_file).packed()
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as pipe:
        pipe.write(content)
        assert receive_identity(stream).packed() == content


@pytest.mark.parametrize("sent", [b"", b"hello\n", b"x" * 100_000, b"x\n" * 100_000])
def test_what_comes_over_a_pipe_and_is_no_key_is_refused(sent: bytes) -> None:
    with pytest.raises(KeyFileError, match="the key that came by standard input is refused"):
        receive_identity(BytesIO(sent))
