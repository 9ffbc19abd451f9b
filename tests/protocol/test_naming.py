"""A name belongs to one actor at a time, and is free again when that actor is gone."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft._protocol.ids import ActorId, PeerId
from aiodaft._protocol.node.naming import NameTable, Registration, check_name
from aiodaft.exceptions import NameNotFound, NameTaken

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=200)

A, B = PeerId("a"), PeerId("b")
ONE, TWO = ActorId(16), ActorId(17)

_ALLOWED = string.ascii_letters + string.digits + "_.-"


def register(table: NameTable, name: str, peer: PeerId = A, actor: ActorId = ONE) -> Registration:
    return table.register(name, peer, actor, f"Model-{actor}", ("models.Model", "aiodaft.Actor"))


# What can be a name.


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


# Who has a name.


def test_a_registered_actor_is_found() -> None:
    table = NameTable()
    made = register(table, "router")
    assert table.lookup("router") == made
    assert (made.name, made.peer, made.actor, made.label) == ("router", A, ONE, "Model-16")
    assert made.class_names == ("models.Model", "aiodaft.Actor")


@pytest.mark.parametrize(("peer", "actor"), [(A, TWO), (B, ONE)])
def test_a_name_that_another_actor_has_is_refused_naming_it(peer: PeerId, actor: ActorId) -> None:
    table = NameTable()
    made = register(table, "router")
    with pytest.raises(NameTaken, match="'router' belongs to Model-16"):
        register(table, "router", peer, actor)
    assert table.lookup("router") == made


def test_a_name_that_cannot_be_is_not_registered() -> None:
    table = NameTable()
    with pytest.raises(ValueError, match="cannot name"):
        register(table, "../router")
    assert table.names_of(A, ONE) == ()


def test_the_same_actor_may_ask_again() -> None:
    table = NameTable()
    first = register(table, "router")
    again = register(table, "router")
    assert again.revision > first.revision
    assert table.names_of(A, ONE) == ("router",)


def test_an_unknown_name_is_refused_with_those_in_use() -> None:
    table = NameTable()
    with pytest.raises(NameNotFound, match="names in use: none"):
        table.lookup("router")
    register(table, "worker")
    register(table, "router")
    with pytest.raises(NameNotFound, match="no actor is named 'ruter'; names in use: router, worker"):
        table.lookup("ruter")


def test_an_actor_may_have_several_names_and_loses_all_with_its_end() -> None:
    table = NameTable()
    for name in ("x", "y"):
        register(table, name)
    register(table, "z", A, TWO)
    assert table.names_of(A, ONE) == ("x", "y")
    assert table.release(A, ONE) == ["x", "y"]
    assert table.names_of(A, ONE) == ()
    assert table.lookup("z").actor == TWO


def test_the_end_of_a_process_frees_the_names_of_all_its_actors() -> None:
    table = NameTable()
    register(table, "x", A, ONE)
    register(table, "y", A, TWO)
    register(table, "z", B, ONE)
    assert table.release(A) == ["x", "y"]
    assert table.release(A) == []
    assert table.lookup("z").peer == B


def test_a_freed_name_can_be_taken_with_a_newer_revision() -> None:
    table = NameTable()
    first = register(table, "router", A, ONE)
    table.release(A, ONE)
    second = register(table, "router", B, TWO)
    assert second.revision > first.revision
    assert table.lookup("router") == second


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
    table, model, newest = NameTable(), dict[str, tuple[PeerId, ActorId]](), 0
    for verb, name, peer, actor in steps:
        if verb == "register":
            if model.get(name, (peer, actor)) != (peer, actor):
                with pytest.raises(NameTaken):
                    register(table, name, peer, actor)
                continue
            made = register(table, name, peer, actor)
            assert made.revision > newest
            newest, model[name] = made.revision, (peer, actor)
        else:
            gone = [n for n, who in model.items() if who == (peer, actor) or (verb == "lost" and who[0] == peer)]
            assert sorted(table.release(peer, actor if verb == "release" else None)) == sorted(gone)
            for each in gone:
                del model[each]
        for each, who in model.items():
            found = table.lookup(each)
            assert (found.peer, found.actor) == who
            assert each in table.names_of(*who)
        for free in {"x", "y", "z"} - model.keys():
            with pytest.raises(NameNotFound):
                table.lookup(free)
