"""Log records in a stream of other output."""

from __future__ import annotations

import random

import pytest

from aiodaft._protocol.diagnostics.printing import Record, Sieve, frames_of

RECORD = {"name": "users.module", "text": "two\nlines \x1e and \udc80 and ☃", "step": 3, "exc_text": None}


def sifted(stream: bytes, size: int = 1 << 20) -> tuple[bytes, list[Record]]:
    """The output, and the records, of a stream that comes in pieces."""
    sieve, printed, records = Sieve(), b"", []
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    for piece in [*pieces, b""]:
        for part in sieve.take(piece):
            if isinstance(part, bytes):
                printed += part
            else:
                records.append(part)
    return printed, records


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_records_come_out_of_what_is_printed_wherever_it_is_cut(size: int) -> None:
    long = {"text": "x" * 20_000}
    (short,) = frames_of(RECORD, 7, 1)
    stream = b"one\nstep 1\rstep 2" + short + b"\rstep 3\n" + b"".join(frames_of(long, 7, 2)) + b"end"
    assert sifted(stream, size) == (b"one\nstep 1\rstep 2\rstep 3\nend", [RECORD, long])


def test_a_frame_is_written_in_one_piece_by_the_kernel() -> None:
    frames = frames_of({"text": "☃" * 10_000}, 4_194_304, 10**17)
    assert len(frames) > 1
    assert max(map(len, frames)) <= 4096


def test_frames_of_processes_that_write_at_the_same_time_do_not_mix() -> None:
    random.seed(1)
    queues = [frames_of({"text": f"{pid}" * 5_000}, pid, number) for pid, number in [(1, 1), (2, 1), (3, 5)]]
    stream = b""
    while queues:
        queue = random.choice(queues)
        stream += queue.pop(0)
        queues = [queue for queue in queues if queue]
    assert sorted(record["text"][0] for record in sifted(stream)[1]) == ["1", "2", "3"]


def test_a_record_with_a_lost_frame_is_left_out_and_the_next_one_is_not() -> None:
    first, second = frames_of({"text": "x" * 9_000}, 7, 1), frames_of(RECORD, 7, 2)
    for lost in range(len(first)):
        assert sifted(b"".join([*first[:lost], *first[lost + 1 :], *second])) == (b"", [RECORD])
    # A process that ended in the middle.
    assert sifted(b"".join(first[:1]) + b"end\n") == (b"end\n", [])


@pytest.mark.parametrize(
    "text",
    [b"\x1e", b"\x1e\x1e\n", b"a \x1e b\n", b"\x1e1 1 1/1", b"\x1e1 1 1/1\n", b"\x1e" + b"7" * 9_000, b"\x1e1 x"],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_the_character_in_other_output_is_output(text: bytes, size: int) -> None:
    assert sifted(text, size) == (text, [])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff"])
def test_what_is_no_object_is_left_out(content: bytes) -> None:
    assert sifted(b"a\x1e1 1 1/1 %s\nb\n" % content) == (b"ab\n", [])


def test_parts_of_many_processes_are_not_kept_for_ever() -> None:
    first = [frames_of({"text": "x" * 9_000}, pid, 1)[0] for pid in range(10_000)]
    rest = frames_of({"text": "x" * 9_000}, 0, 1)[1:]
    assert sifted(b"".join([*first, *rest])) == (b"", [])
