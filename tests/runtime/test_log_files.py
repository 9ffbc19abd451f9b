"""A log file that cannot be written for a while goes on when it can be, and the program hears of both."""

from __future__ import annotations

import logging
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transport_probes import no_more_files

from aiodaft._protocol.ids import PeerId
from aiodaft._runtime.logs.console import LogFiles
from aiodaft._runtime.logs.options import Line, Source

FIRST, SECOND = (Source(PeerId(f"worker-{number}"), f"Model-{number}") for number in (1, 2))


def say(files: LogFiles, source: Source, text: str) -> None:
    files.write(source, Line(1, text, 0.0))


def read(folder: Path, name: str) -> list[str]:
    """The lines, without the times."""
    return [line.rpartition("stdout: ")[2] for line in (folder / f"{name}.log").read_text().splitlines()]


@contextmanager
def no_room(left: int, file: Path) -> Generator[None]:
    """Let a file grow by so many bytes: a disk that gets full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_are_written_again_when_the_disk_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = LogFiles(tmp_path, json=False)
    say(files, FIRST, "before")
    say(files, SECOND, "before")
    with no_room(10, tmp_path / "Model-1.log"):
        for number in range(3):
            say(files, FIRST, f"during {number}")
            say(files, SECOND, f"during {number}")
        # One error, with the reason; no program wants one for each line.
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "lines are left out until they can be" in caplog.text
    say(files, FIRST, "after")
    assert len(caplog.records) == 1
    say(files, SECOND, "after")
    assert "can be written again; 6 lines of actors are missing there" in caplog.records[1].message
    files.close()
    assert len(caplog.records) == 2
    # Of a line that the disk had no room for, the beginning may be there, on a line of its own.
    for name in ("Model-1", "Model-2"):
        before, torn, after = read(tmp_path, name)
        assert (before, after) == ("before", "after")
        assert len(torn) == 10


def test_a_file_that_could_not_be_opened_is_opened_for_the_next_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = LogFiles(tmp_path, json=False)
    say(files, FIRST, "before")
    with no_more_files():
        say(files, SECOND, "lost")
        say(files, FIRST, "during")
    say(files, SECOND, "after")
    files.close()
    assert (read(tmp_path, "Model-1"), read(tmp_path, "Model-2")) == (["before", "during"], ["after"])
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_what_is_missing_at_the_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = LogFiles(tmp_path, json=False)
    with no_more_files():
        say(files, FIRST, "lost")
    files.close()
    assert "are closed; 1 lines of actors are missing there" in caplog.records[-1].message
