"""What actors print and log, and where a debugger would read."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from printers import Printer

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Terminal:
    """What has been printed here up to now."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.out = self.err = ""

    async def shows(self, *, out: str = "", err: str = "") -> None:
        """Wait until there is something to be seen."""
        while out not in self.out or err not in self.err:
            await asyncio.sleep(0)
            # `readouterr` would cut off what is printed between its read and its truncate.
            capture: Any = self._capfd._capture  # noqa: SLF001 - there is no other way to its files
            self.out, self.err = (_content(one.tmpfile.fileno()) for one in (capture.out, capture.err))


def _content(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode()


@pytest.fixture
def terminal(capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capfd)


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


async def test_the_last_lines_of_a_dead_actor_have_the_last_state_of_a_progress_bar(
    module_rt: aiodaft.Runtime,
) -> None:
    with pytest.raises(aiodaft.ActorDied) as caught:
        await (await module_rt.spawn(Printer)).die_with_a_bar()
    assert caught.value.last_lines == ("loading", "step 1000")


async def test_actors_log_from_the_level_of_the_controller_on(
    module_rt: aiodaft.Runtime, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    informed = await module_rt.spawn(Printer)
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    warned = await module_rt.spawn(Printer)
    for printer in (informed, warned):
        await printer.log(logging.DEBUG, logging.INFO, logging.WARNING)
    infos = [await module_rt.info(printer) for printer in (informed, warned)]
    first, second = [f"({info.name} pid={info.pid}) " for info in infos]
    warning = "WARNING:users.module:level 30\n"
    for line in (f"{first}INFO:users.module:level 20\n", first + warning, second + warning):
        await terminal.shows(err=line)
    assert terminal.err.count("users.module") == 3


async def test_an_actor_that_configures_its_logging_has_its_way(module_rt: aiodaft.Runtime, terminal: Terminal) -> None:
    printer = await module_rt.spawn(Printer)
    await printer.configure_logging()
    await printer.log(logging.DEBUG)
    await terminal.shows(err="as the actor likes it: level 10\n")
