"""A name belongs to one actor at a time, and is free again when that actor is gone."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.coordination.records import NamedActor, check_name, check_prefix
from aiodaft._protocol.coordination.registry import Registry, Stored
from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft.exceptions import LeaseLost, NameNotFound, NameTaken

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=200)

A, B = PeerId("a"), PeerId("b")
ONE, TWO = ActorId(16), ActorId(17)

_ALLOWED = string.ascii_letters + string.digits + "_.-"


def new_registry() -> Registry:
    return Registry(Stored(term=1), ttl=10, now=0)


def named(name: str, peer: PeerId = A, actor: ActorId = ONE, epoch: int = 0) -> NamedActor:
    return NamedActor(name, peer, actor, f"Model-{actor}", ("models.Model", "aiodaft.Actor"), epoch=epoch)


def register(registry: Registry, name: str, peer: PeerId = A, actor: ActorId = ONE, epoch: int = 0) -> NamedActor:
    registry.apply(registry.register(named(name, peer, actor, epoch), now=0), now=0)
    return registry.names.lookup(name)


def reserve(registry: Registry, name: str, peer: PeerId, ticket: int) -> NamedActor:
    registry.apply(registry.reserve(named(name, peer, ActorId(ticket)), now=0), now=0)
    held = registry.names.get(name)
    assert held is not None
    return held


def release(registry: Registry, peer: PeerId, actor: ActorId | None = None) -> list[str]:
    changes = registry.release(peer, actor)
    registry.apply(changes, now=0)
    return [change.key for change in changes]


def release_name(registry: Registry, name: str, epoch: int) -> None:
    registry.apply(registry.release_name(name, epoch), now=0)


def names_of(registry: Registry, peer: PeerId, actor: ActorId) -> list[str]:
    return sorted(one.name for one in registry.names.held_by(peer, actor))


# Valid names.


@pytest.mark.parametrize("name", ["router", "r", "_", "-", "0", "a.b-c_d", "A" * 255, "a..", "trailing."])
def test_names_that_fit_into_a_log_line_and_a_path_are_allowed(name: str) -> None:
    assert check_name(name) is name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a" * 256,
        "a b",
        "a/b",
        "../x",
        "a\n",
        "\nmore",
        "a\x00",
        "ä",
        "\u0661",
        "a\u200b",
        "a:b",
    ],
)
def test_other_text_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name an actor"):
        check_name(name)


@pytest.mark.parametrize("name", [None, 5, b"router", ["router"], ("a",), float("nan")])
def test_what_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="cannot name an actor"):
        check_name(name)


def test_a_long_wrong_name_is_not_repeated_in_full() -> None:
    with pytest.raises(ValueError, match="cannot name an actor") as caught:
        check_name("x" * 10_000)
    assert len(str(caught.value)) < 300


@_quick
@given(st.text(max_size=10) | st.text(_ALLOWED, max_size=300))
def test_a_name_is_allowed_if_its_characters_are(name: str) -> None:
    fits = 1 <= len(name) <= 255 and all(char in _ALLOWED for char in name) and not name.startswith(".")
    if fits:
        assert check_name(name) == name
    else:
        with pytest.raises(ValueError, match="cannot name an actor"):
            check_name(name)


@pytest.mark.parametrize("prefix", ["", "a", "a.", "router-1"])
def test_names_are_listed_by_what_they_can_begin_with(prefix: str) -> None:
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", [".", "a b", "*", "a" * 256, None, 3])
def test_names_are_not_listed_by_other_text(prefix: Any) -> None:
    with pytest.raises(ValueError, match="no actor's name begins with"):
        check_prefix(prefix)


# Holders of names.


def test_a_registered_actor_is_found() -> None:
    registry = new_registry()
    made = register(registry, "router")
    assert registry.names.lookup("router") is made
    assert (made.name, made.peer, made.actor, made.label) == ("router", A, ONE, "Model-16")
    assert made.class_names == ("models.Model", "aiodaft.Actor")
    assert made.epoch == made.revision == registry.revision


@pytest.mark.parametrize(("peer", "actor"), [(A, TWO), (B, ONE)])
def test_a_name_that_another_actor_has_is_refused_naming_it(peer: PeerId, actor: ActorId) -> None:
    registry = new_registry()
    made = register(registry, "router")
    with pytest.raises(NameTaken, match="'router' belongs to Model-16"):
        register(registry, "router", peer, actor)
    assert registry.names.lookup("router") == made


def test_a_name_that_cannot_be_is_not_registered() -> None:
    registry = new_registry()
    for decide in (registry.register, registry.reserve):
        with pytest.raises(ValueError, match="cannot name"):
            decide(named("../router"), 0)
    assert names_of(registry, A, ONE) == []


def test_the_same_actor_may_ask_again_and_nothing_changes() -> None:
    registry = new_registry()
    first = register(registry, "router")
    assert registry.register(named("router"), now=0) == []
    assert register(registry, "router") is first


def test_an_unknown_name_is_refused_with_those_in_use() -> None:
    registry = new_registry()
    with pytest.raises(NameNotFound, match="names in use: none"):
        registry.names.lookup("router")
    register(registry, "worker")
    register(registry, "router")
    with pytest.raises(NameNotFound, match="no actor is named 'ruter'; names in use: router, worker"):
        registry.names.lookup("ruter")


def test_names_are_listed_by_prefix_in_order() -> None:
    registry = new_registry()
    for name in ("b.2", "a", "b.1"):
        register(registry, name)
    assert [one.name for one in registry.names.named("b.")] == ["b.1", "b.2"]
    assert [one.name for one in registry.names.named("")] == ["a", "b.1", "b.2"]


def test_an_actor_may_have_several_names_and_loses_all_with_its_end() -> None:
    registry = new_registry()
    for name in ("x", "y"):
        register(registry, name)
    register(registry, "z", A, TWO)
    assert names_of(registry, A, ONE) == ["x", "y"]
    assert release(registry, A, ONE) == ["x", "y"]
    assert names_of(registry, A, ONE) == []
    assert registry.names.lookup("z").actor == TWO


def test_the_end_of_a_process_frees_the_names_of_all_its_actors() -> None:
    registry = new_registry()
    register(registry, "x", A, ONE)
    register(registry, "y", A, TWO)
    register(registry, "z", B, ONE)
    assert release(registry, A) == ["x", "y"]
    assert release(registry, A) == []
    assert registry.names.lookup("z").peer == B


def test_a_freed_name_is_granted_with_a_greater_epoch() -> None:
    registry = new_registry()
    first = register(registry, "router")
    release(registry, A, ONE)
    second = register(registry, "router", B, TWO)
    assert second.epoch > first.epoch
    assert registry.names.lookup("router") is second


def test_a_name_is_freed_only_by_the_epoch_that_it_has() -> None:
    registry = new_registry()
    first = register(registry, "router")
    release_name(registry, "router", first.epoch)
    release_name(registry, "router", first.epoch)
    second = register(registry, "router", B)
    release_name(registry, "router", first.epoch)
    assert registry.names.lookup("router") is second
    release_name(registry, "router", second.epoch)
    assert registry.names.get("router") is None


# Reservations.


def test_of_many_processes_one_reserves_a_name_and_its_actor_gets_it() -> None:
    registry = new_registry()
    mine = reserve(registry, "router", A, 7)
    assert (mine.peer, mine.actor, mine.reserved) == (A, 7, True)
    assert reserve(registry, "router", B, 8) is mine
    assert reserve(registry, "router", A, 7) is mine
    with pytest.raises(NameNotFound):
        registry.names.lookup("router")
    with pytest.raises(NameTaken, match="'router' is reserved for an actor that a makes"):
        register(registry, "router", B, TWO)
    made = register(registry, "router", B, TWO, mine.epoch)
    assert (made.epoch, made.reserved) == (mine.epoch, False)
    assert reserve(registry, "router", B, 8) is made


def test_a_reservation_ends_with_its_process_or_by_its_epoch() -> None:
    registry = new_registry()
    first = reserve(registry, "router", A, int(ONE))
    # The number of a reservation is no actor's.
    assert release(registry, A, ONE) == []
    assert release(registry, A) == ["router"]
    second = reserve(registry, "router", B, 8)
    assert second.epoch > first.epoch
    with pytest.raises(NameTaken):
        register(registry, "router", A, ONE, first.epoch)
    release_name(registry, "router", second.epoch)
    with pytest.raises(LeaseLost, match="'router' is not reserved any more"):
        register(registry, "router", A, ONE, first.epoch)
    assert names_of(registry, A, ONE) == []


def test_a_reservation_is_given_back_by_its_process_alone_and_only_as_long_as_it_is_one() -> None:
    registry = new_registry()

    def unreserve(peer: PeerId, actor: int) -> None:
        registry.apply(registry.unreserve("router", peer, ActorId(actor)), now=0)

    unreserve(A, 7)
    reservation = reserve(registry, "router", A, 7)
    unreserve(A, 8)
    unreserve(B, 7)
    assert registry.names.get("router") is reservation
    unreserve(A, 7)
    assert registry.names.get("router") is None
    made = register(registry, "router", A, ActorId(7))
    unreserve(A, 7)
    assert registry.names.lookup("router") is made


@_quick
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["register", "release", "lost"]),
            st.sampled_from(["x", "y", "z"]),
            st.sampled_from([A, B]),
            # The agent of a process has number 0: it must not be taken for "all of them".
            st.sampled_from([ActorId(0), ONE, TWO]),
        ),
        max_size=30,
    )
)
def test_any_history_of_names_agrees_with_a_dictionary(steps: list[tuple[str, str, PeerId, ActorId]]) -> None:
    registry, model, newest = new_registry(), dict[str, tuple[PeerId, ActorId]](), 0
    for verb, name, peer, actor in steps:
        if verb == "register":
            if model.get(name, (peer, actor)) != (peer, actor):
                with pytest.raises(NameTaken):
                    register(registry, name, peer, actor)
                continue
            made = register(registry, name, peer, actor)
            assert (made.epoch > newest) is (name not in model)
            newest, model[name] = max(newest, made.epoch), (peer, actor)
        else:
            gone = [n for n, who in model.items() if who == (peer, actor) or (verb == "lost" and who[0] == peer)]
            assert sorted(release(registry, peer, actor if verb == "release" else None)) == sorted(gone)
            for each in gone:
                del model[each]
        for each, who in model.items():
            found = registry.names.lookup(each)
            assert (found.peer, found.actor) == who
            assert each in names_of(registry, *who)
        for free in {"x", "y", "z"} - model.keys():
            with pytest.raises(NameNotFound):
                registry.names.lookup(free)
