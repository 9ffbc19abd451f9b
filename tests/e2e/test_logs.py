"""The log records of actors, and the places where they are to be found."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_ear import Ear, listening
from printers import Printer
from terminals import Terminal

import aiodaft

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def ear() -> Iterator[Ear]:
    """Hears the log records of the actors' module."""
    with listening("users.module") as ear:
        yield ear


async def test_records_of_actors_come_to_the_handlers_of_the_program(module_rt: aiodaft.Runtime, ear: Ear) -> None:
    printer = await module_rt.spawn(Printer)
    info = await module_rt.info(printer)
    await printer.log_from_the_loop("100 %\nfree", step=7, state={"not": "plain"})
    record = await ear.hears_record("free")
    assert record.getMessage() == f"({info.name} pid={info.pid}) 100 %\nfree"
    assert (record.name, record.levelno, record.levelname) == ("users.module", logging.WARNING, "WARNING")
    assert (record.filename, record.funcName) == ("printers.py", "log_from_the_loop")
    found = {name: record.__dict__.get(name) for name in ("text", "actor", "method", "rank", "process", "node", "step")}
    assert found == {
        "text": "100 %\nfree",
        "actor": info.name,
        "method": "Printer.log_from_the_loop",
        "rank": None,
        "process": info.pid,
        "node": info.node,
        "step": 7,
    }
    assert not hasattr(record, "state")
    await printer.log_an_error()
    record = await ear.hears_record("not there")
    assert record.exc_text is not None
    assert record.exc_text.endswith("IndexError: list index out of range")
    assert record.threadName == info.name
    fields = json.loads(aiodaft.logs.JsonFormatter().format(record))
    assert (fields["message"], fields["level"]) == ("the requested item is not there", "ERROR")
    assert (fields["actor"], fields["error"]) == (info.name, record.exc_text)


async def test_levels_of_the_program_hold_in_actors_and_changes_follow(module_rt: aiodaft.Runtime, ear: Ear) -> None:
    other = logging.getLogger("users.other")
    early = await module_rt.spawn(Printer)
    await early.log(logging.DEBUG, logging.INFO)
    await ear.hears("level 20")
    assert not any("level 10" in line for line in ear.lines)
    try:
        other.setLevel(logging.DEBUG)
        late = await module_rt.spawn(Printer)
        assert await late.effective_level("users.other.child") == logging.DEBUG
        # The runtime looks once a second.
        while await early.effective_level("users.other.child") != logging.DEBUG:
            await asyncio.sleep(0.01)
        other.setLevel(logging.NOTSET)
        while await late.effective_level("users.other.child") == logging.DEBUG:
            await asyncio.sleep(0.01)
        assert await late.effective_level("users.other") == logging.getLogger().level
    finally:
        other.setLevel(logging.NOTSET)
    # Records that the program does not want any more are not shown, however late its actors hear of that.
    logging.getLogger("users.module").setLevel(logging.ERROR)
    await early.log(logging.WARNING)
    await early.log(logging.ERROR)
    await ear.hears("level 40")
    assert not any("level 30" in line for line in ear.lines)


async def test_what_goes_wrong_unseen_is_logged(module_rt: aiodaft.Runtime) -> None:
    printer = await module_rt.spawn(Printer)
    with listening("py.warnings") as warned, listening() as ear:
        await printer.go_wrong_unseen()
        assert "UserWarning: an odd thing" in await warned.hears("odd")
        assert "ValueError: in __del__" in await ear.hears("__del__")
        assert "IndexError" in await ear.hears("the thread 'worker' ended with an error")


async def test_a_forked_child_of_an_actor_logs_once(module_rt: aiodaft.Runtime, ear: Ear) -> None:
    printer = await module_rt.spawn(Printer)
    await printer.log_in_a_child()
    record = await ear.hears_record("forked child")
    await printer.log(logging.WARNING)
    await ear.hears("level 30")
    assert len(ear.lines) == 2
    info = await module_rt.info(printer)
    assert record.process != info.pid
    assert record.__dict__["actor"] == info.name


async def test_the_last_records_of_an_actor_that_is_killed_are_not_lost(module_rt: aiodaft.Runtime, ear: Ear) -> None:
    with pytest.raises(aiodaft.ActorDied) as caught:
        await (await module_rt.spawn(Printer)).log_and_die()
    assert caught.value.last_lines == ("printed last", "ERROR:users.module:logged last")
    await ear.hears("logged last")


async def test_a_flood_of_records_does_not_block_the_actor_and_what_is_left_out_is_counted(
    module_rt: aiodaft.Runtime, terminal: Terminal, ear: Ear
) -> None:
    count, block = 6_000, asyncio.Event()
    loop, blocked = asyncio.get_running_loop(), asyncio.Event()

    class Slow(logging.Filter):
        """Keeps the thread that reads from reading."""

        def filter(self, record: logging.LogRecord) -> bool:
            loop.call_soon_threadsafe(blocked.set)
            asyncio.run_coroutine_threadsafe(block.wait(), loop).result()
            return True

    slow = Slow()
    printer = await module_rt.spawn(Printer)
    ear.addFilter(slow)
    await printer.log(logging.WARNING)
    await blocked.wait()
    await printer.flood(count)
    block.set()
    ear.removeFilter(slow)
    # Lines for which there was room have been read.
    await printer.warn("all is read")
    await terminal.shows(err="all is read")
    with listening() as warnings:
        await printer.log(logging.ERROR)
        told = await warnings.hears("were left out")
    await ear.hears("level 40")
    dropped = re.match(r"(\d+) log records of Printer", told)
    assert dropped is not None
    assert len(ear.lines) + int(dropped[1]) == count + 2


async def test_an_actor_that_configures_its_logging_has_its_way(
    module_rt: aiodaft.Runtime, terminal: Terminal, ear: Ear, tmp_path: Path
) -> None:
    printer = await module_rt.spawn(Printer)
    # In a process without handlers, this would configure its logging.
    with listening("root") as root_ear:
        await printer.log_by_the_module("of the root logger")
        await root_ear.hears("of the root logger")
        assert len(root_ear.lines) == 1
    await printer.log_to_a_file_too(str(tmp_path / "actor.log"))
    await printer.log(logging.WARNING)
    await ear.hears("level 30")
    assert (tmp_path / "actor.log").read_text() == "level 30\n"
    printer = await module_rt.spawn(Printer)
    await printer.configure_logging()
    await printer.log(logging.INFO)
    await terminal.shows(err="as the actor likes it: level 20\n")
    assert len(ear.lines) == 1


async def test_ranks_that_say_the_same_are_shown_as_one(
    module_rt: aiodaft.Runtime, terminal: Terminal, ear: Ear
) -> None:
    async with module_rt.group(3, Printer) as group:
        await group.all(Printer.log, logging.WARNING)
        record = await ear.hears_record("level 30")
        name = record.__dict__["actor"]
        assert record.getMessage() == f"({name} x3 ranks 0-2) level 30"
        assert (record.__dict__["ranks"], record.__dict__["rank"]) == ([0, 1, 2], None)
        await group.all(Printer.say, "loaded")
        await group.each(Printer.say, ["first", "other", "other"])
        await terminal.shows(out=f"({name} x3 ranks 0-2) loaded\n")
        await terminal.shows(out=f"({name} x2 ranks 1-2) other\n")
        first = await module_rt.info(group[0])
        await terminal.shows(out=f"({name}[0] pid={first.pid}) first\n")
        await group[1].log(logging.ERROR)
        record = await ear.hears_record("level 40")
        assert (record.__dict__["actor"], record.__dict__["rank"]) == (f"{name}[1]", 1)


async def test_without_handlers_records_are_printed_as_lines(
    module_rt: aiodaft.Runtime, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    printer = await module_rt.spawn(Printer)
    info = await module_rt.info(printer)
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        await printer.log(logging.INFO, logging.WARNING)
        await printer.log_an_error()
        title = f"({info.name} pid={info.pid})"
        await terminal.shows(err=f"{title} IndexError: list index out of range\n")
    assert terminal.err.startswith(f"{title} WARNING:users.module:level 30\n{title} ERROR:users.module:the requested")


async def test_each_actor_has_a_file_that_a_restart_goes_on_with(tmp_path: Path) -> None:
    async with aiodaft.Runtime(preload=(), logs=tmp_path / "logs") as rt:
        printer = await rt.on(restart=aiodaft.Restart()).spawn(Printer)
        await printer.say("printed first")
        with pytest.raises(aiodaft.ActorDied):
            await printer.log_and_die()
        await printer.say("printed again")
        async with rt.group(2, Printer) as group:
            await group.all(Printer.say, "loaded")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "Printer-1.log", "Printer-2.0.log", "Printer-2.1.log",
    ]  # fmt: skip
    # Other users read none of them, with any umask.
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()} == {0o600}
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    lines = (tmp_path / "logs" / "Printer-1.log").read_text().splitlines()
    pattern = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} pid=(\d+) (.*)")
    found = [match.groups() for line in lines if (match := pattern.fullmatch(line))]
    assert [text for _, text in found] == [
        "stdout: printed first",
        "stderr: printed last",
        "ERROR users.module: logged last",
        "stdout: printed again",
    ]
    assert len({pid for pid, _ in found}) == 2
    assert (tmp_path / "logs" / "Printer-2.1.log").read_text().endswith("stdout: loaded\n")


async def test_lines_are_json_objects_on_request(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = aiodaft.logs.Logs(folder=tmp_path, json=True)
    async with aiodaft.Runtime(preload=(), logs=logs) as rt, rt.group(2, Printer) as group:
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(), "handlers", [])
            await group[0].progress(*(await _open_gates(tmp_path)))
            await group.all(Printer.log, logging.WARNING)
            await terminal.shows(err="level 30")
            await terminal.shows(out="part 1", err="step 9")
    printed, logged = json.loads(terminal.out), [json.loads(line) for line in terminal.err.splitlines()]
    assert (printed["stream"], printed["message"], printed["rank"]) == ("stdout", "part 1...part 2", 0)
    (record,) = [line for line in logged if "stream" not in line]
    assert (record["message"], record["ranks"], record["method"]) == ("level 30", [0, 1], "Printer.log")
    assert [line["message"] for line in logged if line is not record] == ["step 9"]
    in_file = [json.loads(line) for line in (tmp_path / "Printer-1.1.log").read_text().splitlines()]
    assert [(line["message"], line["rank"]) for line in in_file] == [("level 30", 1)]


async def _open_gates(folder: Path) -> list[str]:
    """Two files that can be opened at once."""
    gates = [folder / "first.gate", folder / "second.gate"]
    for gate in gates:
        gate.touch()
    return [str(gate) for gate in gates]


async def test_a_folder_that_cannot_be_made_is_an_error_when_the_runtime_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        async with aiodaft.Runtime(logs=tmp_path / "file" / "logs"):
            pass
    with pytest.raises(ValueError, match="merge=-1"):
        aiodaft.logs.Logs(merge=-1)
