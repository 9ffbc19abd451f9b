"""Options that `aiodaft up` refuses before it listens, and the first state of its coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.coordination.registry import Registry
from aiodaft._protocol.ids import PeerId
from aiodaft.cli.__main__ import main
from aiodaft.cli.node import new_term


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--label", "=a", "'=a' is not NAME=VALUE"),
        ("--label", " =a", "' =a' is not NAME=VALUE"),
        ("--label", "zone", "'zone' is not NAME=VALUE"),
        ("--resource", "=2", "'=2' is not NAME=VALUE"),
        ("--resource", "disk=two", "--resource disk=two: 'two' is not a number"),
        ("--resource", "disk=-1", "disk=-1.0: resources are numbers that are not negative"),
    ],
)
def test_an_option_that_says_nothing_is_refused(tmp_path: Path, option: str, value: str, why: str) -> None:
    key = str(tmp_path / "key")
    assert CliRunner().invoke(main, ["key", "new", key]).exit_code == 0
    ended = CliRunner().invoke(main, ["up", "--listen", "tcp://127.0.0.1:0", "--key-file", key, option, value])
    assert (ended.exit_code, ended.stdout, ended.stderr) == (1, "", f"aiodaft: {why}\n")


def test_two_coordinators_without_a_store_give_no_epoch_twice_in_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def epochs(at: float) -> set[int]:
        monkeypatch.setattr("time.time_ns", lambda: int(at * 1e9))
        registry = Registry(new_term(), 10, 0)
        for name in ("a", "b", "c"):
            member = Member(name, PeerId(f"node-1@{name}"), "tcp://10.0.0.1:1", {}, {})
            registry.apply(registry.join(member, (), 0), 0)
        return {member.epoch for member in registry.members.all()}

    first, same, later = epochs(1.8e9), epochs(1.8e9), epochs(1.8e9 + 0.002)
    assert len(first | same | later) == 9
    # Epochs only grow, also within a second.
    assert max(first | same) < min(later)
