"""Methods that only read their arguments: writes are found, and objects that are no methods are refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator
from types import ModuleType
from typing import Any

import pytest
import torch

from aiodaft import method
from aiodaft.exceptions import BorrowError
from aiodaft.memory import read_only
from aiodaft.reading import is_read_only


class Reader:
    @read_only
    def write(self, tensor: torch.Tensor, *others: Any, **named: Any) -> str:
        for one in (tensor, *others, *named.values()):
            if isinstance(one, dict | list | tuple):
                (part,) = one.values() if isinstance(one, dict) else one
                part.add_(1.0)
        return "written"

    @read_only
    async def write_later(self, tensor: torch.Tensor) -> None:
        await asyncio.sleep(0)
        tensor[0] = 5.0

    @read_only
    async def items(self, tensor: torch.Tensor) -> AsyncGenerator[int, None]:
        try:
            for item in range(3):
                yield item
        finally:
            tensor.add_(1.0)

    @read_only
    def steps(self, tensor: torch.Tensor) -> Generator[int, None, None]:
        yield 0
        tensor.add_(1.0)
        yield 1


class Writer(Reader):
    def write(self, tensor: torch.Tensor, *others: Any, **named: Any) -> str:
        tensor.add_(1.0)
        return "written by the subclass"


@pytest.mark.parametrize("kind", [lambda x: [x], lambda x: (x,), lambda x: {"x": x}], ids=["list", "tuple", "dict"])
def test_a_write_to_a_part_of_an_argument_is_found_and_the_argument_named(kind: Any) -> None:
    reader, tensor = Reader(), torch.zeros(3)
    assert reader.write(tensor, 1, None, name="x") == "written"
    with pytest.raises(BorrowError, match=r"Reader.write is declared @read_only, but wrote to a tensor of args\[1\]"):
        reader.write(tensor, kind(tensor.clone()))
    with pytest.raises(BorrowError, match="wrote to a tensor of other, which"):
        reader.write(tensor, other=kind(tensor.clone()))


async def test_a_coroutine_and_a_generator_are_looked_at_when_they_end() -> None:
    reader, tensor = Reader(), torch.zeros(3)
    with pytest.raises(BorrowError, match=r"Reader.write_later .* args\[0\]"):
        await reader.write_later(tensor)
    got: list[int] = []
    with pytest.raises(BorrowError, match=r"Reader.items .* args\[0\]"):
        async for item in reader.items(tensor):
            got.append(item)  # noqa: PERF401 - the error comes afterwards
    assert got == [0, 1, 2]
    with pytest.raises(BorrowError, match=r"Reader.steps .* args\[0\]"):
        list(reader.steps(tensor))
    # If its consumer has enough, it ends as it does without the decorator.
    stopped, before = reader.items(tensor), float(tensor[0])
    assert await anext(stopped) == 0
    await stopped.aclose()
    assert tensor[0] == before + 1.0


def test_a_method_that_overrides_one_may_write() -> None:
    assert Writer().write(torch.zeros(3)) == "written by the subclass"
    assert is_read_only(Reader.write)
    assert not is_read_only(Writer.write)


def test_tensors_without_versions_and_a_torch_that_is_being_imported_are_no_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.inference_mode():
        assert Reader().write(torch.zeros(3), [torch.zeros(3)]) == "written"
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert Reader().write(torch.zeros(3)) == "written"


@pytest.mark.parametrize("wrong", [method(Reader.write), staticmethod(Reader.write), property(lambda _: None), 3])
def test_only_a_function_can_be_declared(wrong: Any) -> None:
    with pytest.raises(TypeError, match="@read_only goes on a function, below @method, not on "):
        read_only(wrong)
