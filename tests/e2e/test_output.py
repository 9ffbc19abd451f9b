"""The output of actors, and the input that a debugger would read."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest
from printers import Printer
from terminals import Terminal
from tqdm import tqdm

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_progress_bars_and_lines_without_a_newline_are_shown_as_they_are_printed(
    module_rt: aiodaft.Runtime, terminal: Terminal, tmp_path: Path
) -> None:
    gates = [str(tmp_path / name) for name in ("first", "second")]
    for gate in gates:
        os.mkfifo(gate)
    printer = await module_rt.spawn(Printer)
    info = await module_rt.info(printer)
    ref = printer.progress(*gates)
    await terminal.shows(err="step 9")
    os.close(await asyncio.to_thread(os.open, gates[0], os.O_WRONLY))
    await terminal.shows(out=f"({info.name} pid={info.pid}) part 1...")
    assert not ref.done()
    os.close(await asyncio.to_thread(os.open, gates[1], os.O_WRONLY))
    await ref
    await terminal.shows(out="part 1...part 2\n", err="step 9\n")


async def test_a_bar_of_the_program_stays_below_what_actors_show(
    module_rt: aiodaft.Runtime, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without its thread, and without the process that keeps its lock from Python 3.14 on.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    tqdm.set_lock(threading.RLock())
    gates = [str(tmp_path / name) for name in ("first", "second")]
    for gate in gates:
        os.mkfifo(gate)
    printer = await module_rt.spawn(Printer)
    with tqdm(total=2, desc="program", file=sys.stderr):
        await printer.say("a line")
        await terminal.shows(out="a line\n")
        ref = printer.progress(*gates)
        for gate in gates:
            os.close(await asyncio.to_thread(os.open, gate, os.O_WRONLY))
        await ref
        await terminal.shows(out="part 2\n", err="step 9\n")
        # The bar is drawn again after the lines.
        while not terminal.err.rpartition("\r")[2].startswith("program:   0%"):
            await asyncio.sleep(0.01)
            terminal.look()
        # An incomplete line waits, so that it never stands in the line of the bar.
        assert (terminal.err.count("step"), terminal.out.count("part 1")) == (1, 1)
        states = [line.rpartition("\r")[2] for line in terminal.err.split("\n")]
        assert states[0].endswith("step 9")
        assert states[1].startswith("program:   0%")


async def test_the_last_lines_of_a_dead_actor_have_the_last_state_of_a_progress_bar(
    module_rt: aiodaft.Runtime,
) -> None:
    with pytest.raises(aiodaft.ActorDied) as caught:
        await (await module_rt.spawn(Printer)).die_with_a_bar()
    assert caught.value.last_lines == ("loading", "step 1000")
