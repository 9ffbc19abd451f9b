"""Watchers get every change once, also from a coordinator that was started again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.coordination.records import Batch, Change, History, Kind, NamedActor, Record, View
from aiodaft._protocol.coordination.registry import Registry, Stored
from aiodaft._protocol.ids import ActorId, PeerId

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=200)

_VERBS = ["name", "end", "look", "boot"]


def named(name: str, actor: int = 16) -> NamedActor:
    return NamedActor(name, PeerId("a"), ActorId(actor), f"Model-{actor}", ("m.Model",))


def register(registry: Registry, name: str, actor: int = 16) -> None:
    registry.apply(registry.register(named(name, actor), 0), 0)


def release(registry: Registry, actor: int = 16) -> None:
    registry.apply(registry.release(PeerId("a"), ActorId(actor)), 0)


def told(view: View, registry: Registry, prefix: str = "") -> list[tuple[str, bool]]:
    batch = registry.news(Kind.NAME, prefix, view.revision)
    return [] if batch is None else [(change.key, change.record is not None) for change in view.take(batch)]


def test_a_watcher_begins_with_what_there_is_and_goes_on_with_changes() -> None:
    registry, view = Registry(Stored(term=1), 10, 0), View(Kind.NAME)
    assert told(view, registry) == []
    register(registry, "x")
    register(registry, "y", 17)
    assert told(view, registry) == [("x", True), ("y", True)]
    assert registry.news(Kind.NAME, "", view.revision) is None
    release(registry)
    register(registry, "z")
    assert told(view, registry) == [("x", False), ("z", True)]
    assert sorted(view.records) == ["y", "z"]


def test_a_watcher_hears_only_of_names_that_begin_as_it_asked() -> None:
    registry, view = Registry(Stored(term=1), 10, 0), View(Kind.NAME)
    told(view, registry, "a.")
    register(registry, "b.1")
    assert registry.news(Kind.NAME, "a.", view.revision) is None
    assert registry.news(Kind.MEMBER, "", view.revision) is None
    register(registry, "a.1")
    assert told(view, registry, "a.") == [("a.1", True)]


def test_reservations_are_told_to_no_watcher() -> None:
    registry, view = Registry(Stored(term=1), 10, 0), View(Kind.NAME)
    register(registry, "x", 17)
    told(view, registry)
    registry.apply(registry.reserve(named("y", 7), 0), 0)
    assert registry.news(Kind.NAME, "", view.revision) is None
    assert told(View(Kind.NAME), registry) == [("x", True)]
    registry.apply(registry.release(PeerId("a"), None), 0)
    assert told(view, registry) == [("x", False)]


def test_an_answer_that_comes_twice_is_news_once() -> None:
    registry, view = Registry(Stored(term=1), 10, 0), View(Kind.NAME)
    told(view, registry)
    begin = view.revision
    register(registry, "x")
    release(registry)
    batch = registry.news(Kind.NAME, "", begin)
    assert batch is not None
    assert [change.record is None for change in view.take(batch)] == [False, True]
    assert view.take(batch) == []


@pytest.mark.parametrize("missed", [3, 4, 10])
def test_a_watcher_that_missed_too_much_gets_the_difference(missed: int) -> None:
    history, view = History(100, remembered=3), View(Kind.NAME)
    view.take(Batch(100, True, ()))
    there: dict[str, Record] = {}
    for revision in range(101, 101 + missed):
        key = f"x{revision % 2}"
        there[key] = named(key, revision)
        history.append([Change(revision, Kind.NAME, key, there[key])])
    found = history.since(100, Kind.NAME, "")
    assert (found is None) is (missed > 3)
    changes = found if found is not None else [Change(1, Kind.NAME, key, record) for key, record in there.items()]
    view.take(Batch(history.revision, found is None, tuple(changes)))
    assert view.records == there
    assert history.since(history.revision, Kind.NAME, "") == []
    assert history.since(history.revision + 1, Kind.NAME, "") is None


def test_after_a_restart_a_watcher_hears_only_what_is_different() -> None:
    before, view = Registry(Stored(term=1), 10, 0), View(Kind.NAME)
    for name, actor in (("x", 16), ("y", 17), ("z", 18)):
        register(before, name, actor)
    told(view, before)
    release(before, 16)
    register(before, "z2", 19)
    after = Registry(Stored(term=2, records=tuple(before.names.all())), 10, 0)
    assert sorted(told(view, after)) == [("x", False), ("z2", True)]
    release(after, 17)
    assert told(view, after) == [("y", False)]


@_quick
@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(16, 18), st.sampled_from(["name", "end", "look", "boot"])))
)
def test_any_watcher_ends_with_what_there_is_and_hears_nothing_twice(steps: list[tuple[str, int, str]]) -> None:
    registry, term = Registry(Stored(term=1), 10, 0), 1
    views = [View(Kind.NAME), View(Kind.NAME)]
    heard: dict[str, Record | None] = {}

    def look(view: View) -> None:
        batch = registry.news(Kind.NAME, "", view.revision)
        for change in () if batch is None else view.take(batch):
            if view is views[0]:
                assert heard.get(change.key) != change.record
                heard[change.key] = change.record

    for name, actor, verb in steps:
        if verb == "name" and registry.names.get(name) is None:
            register(registry, name, actor)
        elif verb == "end":
            release(registry, actor)
        elif verb == "look":
            look(views[0])
        elif verb == "boot":
            term += 1
            registry = Registry(Stored(term, tuple(registry.names.all())), 10, 0)
        look(views[1])
    look(views[0])
    for view in views:
        assert list(view.records.values()) == [registry.names.get(name) for name in view.records]
        assert view.records.keys() == {one.name for one in registry.names.all()}
