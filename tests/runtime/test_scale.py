"""The formulas of docs/scale.md hold at small sizes, call by call."""

from __future__ import annotations

import pytest
from cluster_scale import Count, main


@pytest.mark.parametrize("hosts", [3, 6])
def test_what_a_cluster_costs_follows_the_formulas(hosts: int) -> None:
    count = Count(hosts)
    count.run()
    calls = {name: dict(phase.calls) for name, phase in count.phases.items()}
    news = calls["start"].pop("Coordinator.watch_members")
    # Each node asks what is there, and for more; at most, it hears of each later one by itself.
    assert 2 * hosts <= news <= hosts * (hosts + 3) / 2
    assert calls.pop("a machine dies")["Coordinator.watch_members"] == hosts
    assert calls == {
        "start": {"Coordinator.join": hosts, "Coordinator.watch_names": 2 * hosts, "NodeAgent.members": hosts - 1},
        "a lease without events": {"Coordinator.keepalive": 4 * hosts},
        "a program attaches": {"Coordinator.watch_members": 2, "NodeAgent.members": 1},
        "it makes its first actor": {"NodeAgent.place": 1, "NodeAgent.state": hosts},
        "its node says what is free": {"Coordinator.keepalive": hosts},
        "it makes another actor": {"NodeAgent.place": 1},
    }
    assert count.phases["it makes another actor"].kilobytes < 1
    # Nodes and the program are connected to the coordinator; the program to each node and to each of its actors.
    first, _, program = count.connections
    assert (first, program) == (hosts + 2, 2 * hosts + 2)


def test_the_command_prints_a_line_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    main([3])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 hosts: ")
    assert [line[2:35].strip() for line in lines[1:]] == [
        "start", "a lease without events", "a program attaches", "it makes its first actor",
        "its node says what is free", "it makes another actor", "a machine dies",
    ]  # fmt: skip
