"""The choice of the next prompt and of its engine; on a seeded trace, with the batches of engines and no processes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Some
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiodaft
from aiodaft.serve import (
    Load,
    Member,
    Policy,
    Request,
    Sizes,
    Turns,
    least_work,
    prefix_locality,
    round_robin,
    sticky,
    two_choices,
)
from aiodaft.serve.batch import Batch, Sequence
from aiodaft.serve.engine import PAGE, page_keys

ENGINES, PROMPTS = 8, 600


def asked(tokens: bytes, count: int, tenant: str = "", session: str = "") -> Request:
    return Request((*tokens,), count, tenant=tenant, session=session)


def members(*works: int) -> list[Member]:
    return [Member(number, "prefill", Load(16, work)) for number, work in enumerate(works)]  # type: ignore[arg-type]


# The choice of the engine.


def test_prompts_go_round_and_one_that_comes_back_gets_the_next() -> None:
    pool = members(0, 0, 0)
    numbers = count(1)
    chosen = []
    for some in [pool] * 4 + [pool[:2]] * 2 + [pool]:
        member = round_robin(asked(b"x", 1), some)
        with member.sending(asked(b"x", 1), 1, next(numbers)):
            chosen.append(member.engine)
    assert chosen == [0, 1, 2, 0, 1, 0, 2]


def test_work_is_what_was_told_and_what_was_sent_since() -> None:
    first, second = members(100, 130)
    with first.sending(asked(b"long", 1), 50, 1):
        assert (first.work, first.free) == (150, 15)
        assert least_work(asked(b"x", 1), [first, second]) is second
        # An engine's report includes the prompts that it was sent.
        first.take(Load(16, 120))
        assert (first.work, first.free) == (120, 15)
        assert least_work(asked(b"x", 1), [first, second]) is first
    assert (first.work, first.free) == (120, 16)
    with second.sending(asked(b"long", 1), 50, 2):
        pass
    assert second.work == 130


def test_two_choices_takes_the_less_busy_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodaft.serve.routing.random", random.Random(0))
    pool = members(3, 0, 1, 2)
    taken = Counter([two_choices(asked(b"x", 1), pool).engine for _ in range(600)])
    assert taken[1] > taken[2] > taken[3] > taken[0] == 0
    assert two_choices(asked(b"x", 1), pool[:1]) is pool[0]


def test_a_known_beginning_counts_until_it_is_forgotten_or_the_engine_is_too_busy() -> None:
    pool, begin = members(0, 0), b"b" * 4 * PAGE
    with pool[1].sending(asked(begin + b"one", 1), 0, 1):
        pass
    assert (pool[0].known(asked(begin + b"two", 1)), pool[1].known(asked(begin + b"two", 1))) == (0, 4 * PAGE)
    assert prefix_locality(asked(begin + b"two", 1), pool) is pool[1]
    pool[1].take(Load(16, 10_000))
    assert prefix_locality(asked(begin + b"two", 1), pool) is pool[0]
    pool[1].take(Load(16, 0, page_keys(begin)[2:]))
    assert pool[1].known(asked(begin + b"two", 1)) == 2 * PAGE
    pool[1].lose()
    assert (pool[1].load, pool[1].known(asked(begin, 1))) == (None, 0)


def test_a_session_stays_at_its_engine_and_finds_another_one_when_that_is_gone() -> None:
    pool = members(0, 0, 0, 0)
    homes = {name: sticky(asked(b"x", 1, session=name), pool) for name in map(str, range(64))}
    assert len({*homes.values()}) == 4
    pool[0].take(Load(16, 10_000))
    assert all(sticky(asked(b"y", 9, session=name), pool) is home for name, home in homes.items())
    left = pool[1:]
    for name, home in homes.items():
        assert sticky(asked(b"x", 1, session=name), left) is home or home is pool[0]
    assert sticky(asked(b"x", 1), pool) is not pool[0]


# On a trace.


@dataclass
class Simulated:
    """Engines that take a step at a time, and push their loads."""

    policy: Policy
    sizes: Sizes
    engines: list[Batch] = field(default_factory=list)
    pool: list[Member] = field(default_factory=list)
    ends: dict[Sequence, ExitStack] = field(default_factory=dict)
    began: dict[Sequence, int] = field(default_factory=dict)
    ticks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engines = [Batch(self.sizes) for _ in range(ENGINES)]
        self.pool = [Member(engine, "prefill", engine.load()) for engine in self.engines]

    def run(self, trace: list[tuple[int, Request]]) -> None:
        arriving, now, number = list(reversed(trace)), 0, count(1)
        while arriving or self.ends:
            while arriving and arriving[-1][0] <= now:
                _, prompt = arriving.pop()
                member = self.policy(prompt, self.pool)
                self.send(member, prompt, next(number), now)
            for member in self.pool:
                self.step(member, now)
            now += 1

    def send(self, member: Member, prompt: Request, number: int, now: int) -> None:
        sequence = Sequence([*prompt.tokens], prompt.cost, prompt)
        member.engine.add(sequence)
        self.ends[sequence] = ExitStack()
        self.ends[sequence].enter_context(member.sending(prompt, prompt.cost, number))
        self.began[sequence] = now

    def step(self, member: Member, now: int) -> None:
        for row in member.engine.plan():
            if member.engine.advance(row, 0) and len(row.sequence.tokens) == row.sequence.end:
                self.ends.pop(row.sequence).close()
                self.ticks.append(now - self.began[row.sequence])
        if member.engine.has_news:
            member.take(member.engine.load())

    @property
    def hit_rate(self) -> float:
        return sum(e.hit_tokens for e in self.engines) / sum(e.prompt_tokens for e in self.engines)

    @property
    def messages(self) -> int:
        return sum(member.told for member in self.pool)


def trace_of(seed: int, every: float) -> list[tuple[int, Request]]:
    """Prompts that come at random, with some beginnings more often than others."""
    rng = random.Random(seed)
    begins = [rng.randbytes(rng.randrange(64, 192)) for _ in range(96)]
    trace, now = [], 0.0
    for _ in range(PROMPTS):
        begin = begins[int(len(begins) * rng.random() ** 2)]
        trace.append((int(now), asked(begin + rng.randbytes(rng.randrange(8, 64)), rng.randrange(4, 40))))
        now += rng.expovariate(1 / every)
    return trace


def best_hit_rate(trace: list[tuple[int, Request]]) -> float:
    """That of one engine that has all prompts, one after the other, and never forgets."""
    engine = Batch(Sizes(pages=100_000))
    for _, prompt in trace:
        engine.add(Sequence([*prompt.tokens], len(prompt.tokens) + 1, prompt))
        while engine.work:
            for row in engine.plan():
                engine.advance(row, 0)
    return engine.hit_tokens / engine.prompt_tokens


def simulated(policy: Policy, trace: list[tuple[int, Request]]) -> Simulated:
    simulation = Simulated(policy, Sizes(pages=160))
    simulation.run(trace)
    assert len(simulation.ticks) == PROMPTS
    return simulation


@pytest.mark.parametrize("seed", range(2))
def test_prefix_locality_finds_what_is_known_and_makes_prompts_faster(seed: int) -> None:
    trace = trace_of(seed, every=0.5)
    best = best_hit_rate(trace)
    local, others = simulated(prefix_locality, trace), simulated(least_work, trace)
    assert local.hit_rate >= 0.8 * best
    assert others.hit_rate < 0.3 * best
    assert mean(local.ticks) < 0.6 * mean(others.ticks)


def asking(prompt: Request, members: Some[Member]) -> Member:
    """Probes every engine for its work now."""
    return min(members, key=lambda member: member.engine.work)


def at_random(prompt: Request, members: Some[Member]) -> Member:
    return random.choice(members)


@pytest.mark.parametrize("seed", range(2))
def test_two_choices_by_pushed_loads_balance_almost_as_well_as_asking_every_engine(seed: int) -> None:
    random.seed(seed)
    trace = trace_of(seed, every=0.7)
    pushed, asked, none = [simulated(policy, trace) for policy in (two_choices, asking, at_random)]
    # A question and an answer for each engine and prompt.
    assert pushed.messages <= 0.1 * (2 * ENGINES * PROMPTS)
    assert mean(pushed.ticks) < 1.25 * mean(asked.ticks)
    assert mean(pushed.ticks) < 0.9 * mean(none.ticks)


# The choice of the prompt.


def test_one_tenant_has_its_prompts_in_order_and_without_a_quantum_all_have() -> None:
    turns = Turns()
    prompts = [asked(b"x", 10, tenant) for tenant in "aaab"]
    for prompt in prompts:
        turns.enter(prompt)
    assert begun(turns) == prompts


def test_a_tenant_with_one_prompt_does_not_wait_for_all_of_another_one() -> None:
    turns = Turns(quantum=100)
    prompts = [asked(b"x" * 50, 50, tenant) for tenant in "aaaaab"]
    for prompt in prompts:
        turns.enter(prompt)
    assert [prompts.index(prompt) for prompt in begun(turns)] == [0, 5, 1, 2, 3, 4]


def test_beyond_the_queue_prompts_are_refused_and_one_that_leaves_makes_room() -> None:
    turns = Turns(most=2)
    waiting = [asked(b"x", 1), asked(b"x", 1)]
    for prompt in waiting:
        turns.enter(prompt)
    with pytest.raises(aiodaft.Overloaded, match="2 requests wait, as many as may"):
        turns.enter(asked(b"x", 1))
    turns.leave(waiting[0])
    turns.enter(last := asked(b"x", 1))
    assert begun(turns) == [waiting[1], last]
    assert turns.credit == {}


def test_a_request_of_any_size_is_paid_in_as_many_turns_as_it_takes_at_once() -> None:
    turns = Turns(quantum=1)
    prompts = [asked(b"x", 1 << 40), asked(b"y", 1)]
    for prompt in prompts:
        turns.enter(prompt)
    assert begun(turns) == prompts
    with pytest.raises(ValueError, match="quantum is to be more than 0 tokens, not 0"):
        Turns(quantum=0)


def begun(turns: Turns) -> list[Request]:
    found = []
    while turns.waiting:
        found.append(prompt := turns.next())
        turns.pay(prompt)
        turns.leave(prompt)
    return found


@settings(deadline=None)
@given(
    st.integers(1, 300),
    st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), st.integers(1, 200)), st.none()), max_size=120),
)
def test_while_a_tenant_waits_no_other_one_gets_much_more(quantum: int, events: list[tuple[str, int] | None]) -> None:
    """An event is a prompt that comes, or a place that becomes free."""
    turns, most = Turns(quantum, most=1000), 0
    got = Counter[str]()
    # The tokens of each tenant when the first prompt of a tenant that waits became its first.
    before: dict[str, Counter[str]] = {}
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            tenant, cost = event
            most = max(most, cost + 1)
            turns.enter(asked(b"x", cost, tenant))
        elif turns.waiting:
            prompt = turns.next()
            for tenant, then in before.items():
                assert all(got[other] - then[other] <= 2 * (quantum + most) for other in got if other != tenant)
            turns.pay(prompt)
            turns.leave(prompt)
            got[prompt.tenant] += prompt.cost
            before.pop(prompt.tenant)
        for prompt in turns.waiting:
            before.setdefault(prompt.tenant, got.copy())
    assert turns.waiting == []
    assert turns.credit == {}
