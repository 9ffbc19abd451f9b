"""The last lines of actors, for `aiodaft logs`."""

from __future__ import annotations

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.console import Recent, Said
from aiodaft._runtime.logs.options import Line, Source


def line(process: int, text: str) -> Said:
    return Said(Source(PeerId(f"worker-{process}"), f"Model-{process}", pid=process), Line(1, text, 0))


def texts(said: list[Said]) -> list[str]:
    return [one.entry.text for one in said if isinstance(one.entry, Line)]


def test_a_process_that_writes_much_pushes_out_its_own_lines_alone() -> None:
    recent = Recent()
    recent.add(line(1, "quiet"))
    for number in range(1_000):
        recent.add(line(2, str(number)))
    recent.add(line(3, "last"))
    kept, _ = recent.follow(lambda: None)
    assert texts(kept) == ["quiet", *map(str, range(900, 1_000)), "last"]


def test_the_process_that_has_been_silent_for_longest_is_forgotten_first() -> None:
    recent = Recent()
    for process in range(201):
        for number in range(100):
            recent.add(line(process, str(number)))
        recent.add(line(0, "again"))
    kept, _ = recent.follow(lambda: None)
    assert {said.source.pid for said in kept} == {0, *range(2, 201)}


def test_a_follower_that_does_not_take_is_told_how_much_it_misses() -> None:
    recent, news = Recent(), list[None]()
    _, follower = recent.follow(lambda: news.append(None))
    for number in range(10_002):
        recent.add(line(1, str(number)))
    said, dropped = follower.take()
    assert (len(news), len(said), dropped) == (1, 10_000, 2)
    recent.add(line(1, "more"))
    recent.leave(follower)
    recent.add(line(1, "too late"))
    assert (len(news), texts(follower.take()[0])) == (2, ["more"])


def test_lines_are_found_by_actor_and_by_group() -> None:
    source = Source(PeerId("worker-1"), "Model-1", names="Model-1+Trainer-2[3]")
    printed, logged = Said(source, Line(1, "", 0)), Said(source, {"actor": "Trainer-2[3]"})
    names = ("Model-1", "Trainer-2[3]", "Trainer-2", "Model", "M", "")
    assert [name for name in names if printed.is_of(name)] == ["Model-1", "Trainer-2[3]", "Trainer-2"]
    assert [name for name in names if logged.is_of(name)] == ["Trainer-2[3]", "Trainer-2"]
