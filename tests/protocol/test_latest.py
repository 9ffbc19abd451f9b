"""Tables of facts that are remembered for a while do not grow."""

from __future__ import annotations

from aiodaft._protocol.numbers import Latest


def test_a_new_entry_takes_the_place_of_the_oldest() -> None:
    table = Latest[str, int](2)
    table["a"], table["b"] = 1, 2
    table["a"] = 3
    assert table == {"a": 3, "b": 2}
    table["c"] = 4
    assert table == {"b": 2, "c": 4}
    table["b"] = table.pop("b")
    table["d"] = 5
    assert list(table) == ["b", "d"]
