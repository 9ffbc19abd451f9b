"""Runs the program, without processes and as it is."""

from __future__ import annotations

import aiodaft
import pytest

from main import count_words, main


async def test_the_words_of_several_texts_are_counted(daft: aiodaft.Runtime) -> None:
    assert await count_words(daft, ["b a b", "b a", "c"]) == [("b", 3), ("a", 2), ("c", 1)]


async def test_the_program_prints_the_most_common_words(capsys: pytest.CaptureFixture[str]) -> None:
    await main(["to be or not to be"])
    assert capsys.readouterr().out.split()[:2] in (["2", "to"], ["2", "be"])
