"""The batch of an engine: which tokens each step computes, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodaft.serve import Load, Request, Sizes
from aiodaft.serve.batch import Batch, Row, Sequence
from aiodaft.serve.engine import PAGE, page_keys


def sequence_of(tokens: bytes, end: int, stops: frozenset[int] = frozenset()) -> Sequence:
    return Sequence([*tokens], end, Request((*tokens,), end - len(tokens), stops=stops))


def follows(tokens: bytes) -> int:
    """A model: the next token depends on all tokens."""
    return (sum(tokens) * 31 + len(tokens)) % 256


def continued(prompt: bytes, end: int) -> bytes:
    while len(prompt) < end:
        prompt += bytes([follows(prompt)])
    return prompt


@dataclass
class Steps:
    """Computes steps with a memory of tokens in place of keys and values, and checks what each row finds there."""

    batch: Batch
    memory: dict[int, dict[int, int]] = field(default_factory=dict)
    done: int = 0

    def compute(self) -> list[Sequence]:
        """Returns the sequences that got a token."""
        rows = self.batch.plan()
        tokens = [self.row(row) for row in rows]
        self.done += 1
        return [row.sequence for row, token in zip(rows, tokens, strict=True) if self.batch.advance(row, token)]

    def complete(self) -> None:
        while self.batch.work:
            self.compute()

    def row(self, row: Row) -> int:
        for start, tokens in row.sequence.imported:
            self.write(row, start, tokens)
        seen = bytes(self.memory[row.pages[place // PAGE]][place % PAGE] for place in range(row.start))
        assert [*seen] == row.sequence.tokens[: row.start]
        self.write(row, row.start, bytes(row.tokens))
        return follows(seen + bytes(row.tokens))

    def write(self, row: Row, start: int, tokens: bytes) -> None:
        for place, token in enumerate(tokens, start):
            self.memory.setdefault(row.pages[place // PAGE], {})[place % PAGE] = token


def batch_of(*sequences: Sequence, **sizes: int) -> Batch:
    batch = Batch(Sizes(**sizes))
    for sequence in sequences:
        batch.add(sequence)
    return batch


def test_each_step_has_a_token_of_all_that_decode_while_a_long_prompt_comes_in_chunks() -> None:
    short = [sequence_of(bytes([number]), 60) for number in range(3)]
    steps = Steps(batch_of(*short, chunk=8))
    steps.compute()
    long = sequence_of(bytes(range(100)), 101)
    steps.batch.add(long)
    for _ in range(100 // 8):
        assert steps.compute() == short
    assert steps.compute() == [*short, long]
    assert bytes(long.tokens) == continued(bytes(range(100)), 101)


def test_prompts_that_begin_alike_share_pages_and_another_one_does_not() -> None:
    begin = bytes(range(2 * PAGE))
    steps = Steps(batch_of(sequence_of(begin + b"one", 40), chunk=100))
    steps.compute()
    steps.batch.add(sequence_of(begin + b"two", 40))
    steps.batch.add(sequence_of(b"!" + begin, 40))
    # Of a prompt that is known as a whole, the last token is computed again: there are no logits of it.
    steps.batch.add(sequence_of(begin, 40))
    steps.compute()
    assert steps.batch.hit_tokens == 2 * PAGE + PAGE
    assert steps.batch.pages.in_use == 3 + 1 + 3 + 1


def test_what_is_dropped_or_complete_leaves_no_page_in_use() -> None:
    dropped, waiting, complete = (
        sequence_of(b"dropped", 100),
        sequence_of(b"waiting", 100),
        sequence_of(b"complete", 10),
    )
    steps = Steps(batch_of(dropped, complete, waiting, places=2))
    for _ in range(3):
        steps.compute()
    assert [waiting] == [*steps.batch.waiting]
    for sequence in (dropped, waiting, complete):
        steps.batch.drop(sequence)
        steps.batch.drop(sequence)
    assert (steps.batch.pages.in_use, steps.batch.work, steps.batch.plan()) == (0, 0, [])


def test_the_youngest_loses_its_pages_when_there_is_no_room_and_goes_on_later() -> None:
    old, young, new = (sequence_of(bytes([kind]) * PAGE, 3 * PAGE) for kind in range(3))
    steps = Steps(batch_of(old, young, new, pages=4, places=2))
    while len(old.tokens) < old.end:
        steps.compute()
    assert steps.batch.preempted == 1
    assert PAGE < len(young.tokens) < young.end
    assert [*steps.batch.waiting] == [young, new]
    steps.complete()
    assert [bytes(each.tokens) for each in (old, young, new)] == [
        continued(bytes([kind]) * PAGE, 48) for kind in range(3)
    ]


def test_keys_and_values_of_another_engine_are_not_computed_again() -> None:
    prompt = bytes(range(50))
    imported = sequence_of(prompt + bytes([follows(prompt)]), 60)
    imported.imported, imported.ready = [(0, prompt[:20]), (20, prompt[20:])], 50
    steps = Steps(batch_of(imported))
    while len(imported.tokens) < imported.end:
        steps.compute()
    assert bytes(imported.tokens) == continued(prompt, 60)
    assert (steps.done, steps.batch.prompt_tokens) == (9, 0)


def test_a_stop_token_completes_a_sequence_and_one_in_its_prompt_does_not() -> None:
    stop = follows(b"\x05stop")
    stopped = sequence_of(b"\x05stop", 60, frozenset({stop, 5}))
    steps = Steps(batch_of(stopped))
    steps.complete()
    assert (bytes(stopped.tokens), stopped.complete) == (b"\x05stop" + bytes([stop]), True)
    assert steps.batch.pages.in_use == 0


def test_a_part_of_the_keys_and_values_is_imported_and_the_rest_is_computed() -> None:
    moved = sequence_of(continued(b"moved", 50), 60)
    moved.imported, moved.ready = [(0, bytes(moved.tokens[:40]))], 40
    steps = Steps(batch_of(moved, chunk=4))
    steps.complete()
    assert bytes(moved.tokens) == continued(b"moved", 60)
    assert steps.done == 3 + 9


def test_keys_of_pages_stand_for_all_tokens_before_their_end() -> None:
    some, other = page_keys(range(50)), page_keys([7, *range(1, 50)])
    assert len(some) == 50 // PAGE
    assert not {*some} & {*other}
    assert page_keys(range(100), some) == page_keys(range(100))
    assert page_keys(range(100))[: len(some)] == some


def test_a_sequence_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens do not fit into 4 pages of 16"):
        batch_of(sequence_of(b"long", 65), pages=4)


def test_routers_are_told_when_the_work_has_changed_by_much_or_pages_are_reused() -> None:
    steps = Steps(batch := batch_of(pages=17))
    assert not batch.has_news
    batch.add(sequence_of(b"a" * 200, 255))
    assert not batch.has_news
    batch.add(sequence_of(b"b", 2))
    assert batch.has_news
    assert batch.load().work == 257
    assert not batch.has_news
    steps.complete()
    assert batch.has_news
    assert batch.load() == Load(16, 0, [], asked=201, hits=0)
    for prompt in (b"c" * 250, b"d" * 250):
        batch.add(sequence_of(prompt, 260))
        steps.complete()
    assert not batch.work
    assert batch.has_news
    assert page_keys(b"a" * PAGE)[0] in batch.load().forgotten
    # At rest, the counts are those of now.
    assert not batch.has_news
    batch.add(sequence_of(b"e", 2))
    steps.complete()
    assert batch.has_news
    assert batch.load().asked == 702
    assert not batch.has_news


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(9, 20),
    st.integers(1, 5),
    st.integers(1, 40),
    st.data(),
)
def test_sequences_come_out_right_whatever_the_sizes_and_whoever_leaves(
    asked: list[tuple[int, int, int]], pages: int, places: int, chunk: int, data: st.DataObject
) -> None:
    prompts = [bytes([kind]) * (length // 2) + bytes([kind + 1]) * (length - length // 2) for length, _, kind in asked]
    ends = [len(prompt) + count for prompt, (_, count, _) in zip(prompts, asked, strict=True)]
    sequences = [sequence_of(prompt, end) for prompt, end in zip(prompts, ends, strict=True)]
    steps = Steps(batch_of(*sequences, pages=pages, places=places, chunk=chunk))
    left = set[Sequence]()
    while steps.batch.work:
        steps.compute()
        assert steps.done < 20_000
        if data.draw(st.integers(0, 30)) == 0:
            left.add(leaver := data.draw(st.sampled_from(sequences)))
            steps.batch.drop(leaver)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert bytes(sequence.tokens) == continued(prompt, len(sequence.tokens))
        assert len(sequence.tokens) == sequence.end or sequence in left
    assert steps.batch.pages.in_use == 0
    assert len(steps.batch.pages.free) + len(steps.batch.pages.idle) == pages
