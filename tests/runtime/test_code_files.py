"""A folder of modules arrives as it was, without files that are none of its code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiodaft._protocol.connections.codec import pack
from aiodaft._runtime.node import shipped_code
from aiodaft._runtime.node.shipped_code import pack_code, unpack_code


def folder(at: Path, *names: str) -> Path:
    """A folder with files that contain their own names."""
    for name in names:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(name)
    return at


def arrived(path: Path) -> dict[str, str]:
    """The files in the folder that an archive of this path is unpacked to."""
    target = path.parent / "arrived"
    target.mkdir()
    unpack_code(pack_code(str(path)), str(target))
    files = [file for file in target.rglob("*") if not file.is_dir()]
    assert not any(file.is_symlink() for file in files)
    return {str(file.relative_to(target)): file.read_text() for file in files}


def test_modules_packages_and_their_data_arrive(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", "a.py", "b/__init__.py", "b/c/data.json", "empty.py")
    (source / "empty.py").write_text("")
    (source / "a.py").chmod(0o755)
    (source / "no files here").mkdir()
    found = arrived(source)
    assert found == {"a.py": "a.py", "b/__init__.py": "b/__init__.py", "b/c/data.json": "b/c/data.json", "empty.py": ""}
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "arrived").glob("*.py")}
    assert modes == {"a.py": 0o700, "empty.py": 0o600}


def test_what_is_hidden_or_compiled_is_left_out(tmp_path: Path) -> None:
    source = folder(
        tmp_path / "src", "a.py", ".git/config", ".env", "b/.hidden.py", "b/__pycache__/c.pyc", "b/d.pyc", "b/e.py"
    )
    assert set(arrived(source)) == {"a.py", "b/e.py"}


def test_a_package_and_a_module_keep_their_names(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", "package/__init__.py", "package/a.py", "alone.py")
    assert set(arrived(source / "package")) == {"package/__init__.py", "package/a.py"}
    (source / "arrived").rename(tmp_path / "arrived")
    assert set(arrived(source / "alone.py")) == {"alone.py"}


def test_equal_content_gives_equal_archives(tmp_path: Path) -> None:
    names = [f"{letter}/{number}.py" for letter in "cab" for number in range(20)]
    one, two = folder(tmp_path / "one", *names), folder(tmp_path / "two", *reversed(names))
    assert pack_code(str(one)) == pack_code(f"{two}/.") == pack_code(os.path.relpath(two))
    (two / "a/1.py").write_text("changed")
    assert pack_code(str(one)) != pack_code(str(two))


def test_links_inside_are_followed_and_lead_into_no_circle(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", "a/b.py")
    (source / "c.py").symlink_to("a/b.py")
    (source / "d").symlink_to("a")
    (source / "a" / "up").symlink_to("..")
    # Once more by each way that does not lead back.
    assert set(arrived(source)) == {"a/b.py", "c.py", "d/b.py"}


@pytest.mark.parametrize("target", ["../other/secret.py", "../other", "/etc/passwd", "../src2"])
def test_a_link_that_leads_out_is_refused_and_named(tmp_path: Path, target: str) -> None:
    folder(tmp_path / "other", "secret.py")
    folder(tmp_path / "src2", "secret.py")
    source = folder(tmp_path / "src", "a/b.py")
    (source / "a" / "link").symlink_to(f"../{target}" if target.startswith("..") else target)
    with pytest.raises(ValueError, match=r"src/a/link leads out of .*src, to /.*: ship that, too, or remove the link"):
        pack_code(str(source))


def test_what_is_no_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "src", "a.py")
    os.mkfifo(source / "pipe")
    with pytest.raises(ValueError, match=r"src/pipe cannot be shipped: it is neither a file nor a folder"):
        pack_code(str(source))
    os.mkfifo(source / "pipe.py")
    with pytest.raises(ValueError, match=r"pipe\.py cannot be shipped: it is neither a folder nor a module"):
        pack_code(str(source / "pipe.py"))


def test_what_cannot_be_shipped_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        pack_code(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match=r"missing\.py"):
        pack_code(str(tmp_path / "missing.py"))
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    with pytest.raises(ValueError, match="empty cannot be shipped: there is no file in it"):
        pack_code(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"model\.pt cannot be shipped: it is neither a folder nor a module"):
        pack_code(str(folder(tmp_path, "model.pt") / "model.pt"))


def test_too_many_files_and_bytes_are_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "src", "a.py", "b.py")
    monkeypatch.setattr(shipped_code, "MAX_FILES", 1)
    with pytest.raises(ValueError, match="src cannot be shipped: it has more than 1 files: ship a folder with nothing"):
        pack_code(str(source))
    monkeypatch.undo()
    monkeypatch.setattr(shipped_code, "MAX_BYTES", 7)
    with pytest.raises(ValueError, match=r"with /.*/src/b.py \(4 bytes\) it has more than 7 bytes: ship a folder"):
        pack_code(str(source))


@pytest.mark.parametrize("path", ["../out.py", "/tmp/out.py"])
def test_an_archive_that_leads_out_writes_nothing(tmp_path: Path, path: str) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="does not lie in the folder"):
        unpack_code(pack([["a.py", False, b""], [path, False, b""]]), str(tmp_path / "in"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]


def test_a_file_that_is_there_is_not_overwritten_nor_written_through(tmp_path: Path) -> None:
    victim = folder(tmp_path, "victim") / "victim"
    target = tmp_path / "in"
    target.mkdir()
    (target / "a.py").symlink_to(victim)
    with pytest.raises(FileExistsError):
        unpack_code(pack([["a.py", False, b"x"]]), str(target))
    assert victim.read_text() == "victim"
