"""The actors that are restarted, the waits before that, and the end of it: OTP's rules, with virtual time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Final, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import aiodaft
from aiodaft._protocol.ids import ActorId, epoch_of, incarnation, number_of
from aiodaft._protocol.supervision import (
    KINDS,
    STRATEGIES,
    Again,
    Backoff,
    GiveUp,
    Gone,
    Kind,
    Restart,
    Siblings,
    Strategy,
    supervision_of,
)

_quick = settings(deadline=None, derandomize=True, database=None, max_examples=200)

_NO_WAIT: Final = Backoff(base=0)


def family(
    strategy: Strategy, kinds: dict[str, Kind], intensity: int = 1, period: float = 5.0
) -> Siblings[str, object]:
    siblings: Siblings[str, object] = Siblings(
        Restart(strategy=strategy, intensity=intensity, period=period, backoff=_NO_WAIT), lambda: 0.0
    )
    for child, kind in kinds.items():
        siblings.add(child, kind)
    return siblings


@pytest.mark.parametrize(
    ("strategy", "stop", "start"),
    [("one_for_one", "", "c"), ("one_for_all", "edba", "abcde"), ("rest_for_one", "ed", "cde")],
)
def test_the_strategy_says_who_restarts_and_in_which_order(strategy: Strategy, stop: str, start: str) -> None:
    siblings = family(strategy, dict.fromkeys("abcde", "permanent"))
    decision = siblings.failed("c", "died", normal=False, now=0)
    assert decision == Again(tuple(stop), tuple(start), (), 1, 0)
    assert siblings.down == tuple(start)
    for child in start:
        siblings.came_up(child, 0)
    assert siblings.down == ()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_not_restarted_does_not_affect_its_siblings(strategy: Strategy) -> None:
    cases: list[tuple[Kind, bool]] = [("transient", True), ("temporary", False), ("temporary", True)]
    for kind, normal in cases:
        siblings = family(strategy, {"a": "permanent", "b": kind, "c": "permanent"}, intensity=0)
        assert siblings.failed("b", "ended", normal=normal, now=0) == Gone("b")
        # It left no trace: not among the deaths, and not among the siblings.
        assert siblings.failed("a", "died", normal=False, now=0) == GiveUp(("a",), ("died",))


def test_permanent_and_transient_ones_are_restarted_after_a_failure() -> None:
    cases: list[tuple[Kind, bool]] = [("permanent", True), ("permanent", False), ("transient", False)]
    for kind, normal in cases:
        decision = family("one_for_one", {"a": kind}).failed("a", "died", normal=normal, now=0)
        assert isinstance(decision, Again)
        assert decision.start == ("a",)


def test_temporary_siblings_are_stopped_with_the_others_and_stay_away() -> None:
    siblings = family("one_for_all", {"a": "permanent", "b": "temporary", "c": "transient"}, intensity=2)
    assert siblings.failed("a", "died", normal=False, now=0) == Again(("c", "b"), ("a", "c"), ("b",), 1, 0)
    for child in ("a", "c"):
        siblings.came_up(child, 0)
    assert siblings.failed("c", "died too", normal=False, now=1) == Again(("a",), ("a", "c"), (), 2, 0)


def test_a_death_among_those_that_wait_adds_to_them() -> None:
    siblings = family("rest_for_one", dict.fromkeys("abc", "permanent"), intensity=3)
    assert siblings.failed("c", 1, normal=False, now=0) == Again((), ("c",), (), 1, 0)
    assert siblings.failed("a", 2, normal=False, now=0) == Again(("b",), ("a", "b", "c"), (), 2, 0)
    siblings.came_up("a", 0)
    # It could not be made; the one before it is up and stays so.
    assert siblings.failed("b", 3, normal=False, now=0) == Again((), ("b", "c"), (), 3, 0)


def test_the_limit_is_the_number_of_restarts_within_the_period() -> None:
    siblings = family("one_for_one", {"a": "permanent"}, intensity=2, period=5)
    for now, count in ((0.0, 1), (4.9, 2), (5.0, 2), (9.9, 2)):
        decision = siblings.failed("a", now, normal=False, now=now)
        assert isinstance(decision, Again)
        assert decision.count == count
        siblings.came_up("a", now)
    assert siblings.failed("a", 9.95, normal=False, now=9.95) == GiveUp(("a",), (5.0, 9.9, 9.95))


def test_without_a_limit_no_child_is_given_up_and_waits_grow_until_it_has_been_up_for_the_period() -> None:
    policy = Restart(intensity=None, period=5, backoff=Backoff(base=1, max=30, jitter=0))
    siblings: Siblings[str, object] = Siblings(policy, lambda: 0.0)
    siblings.add("a", "permanent")
    now, waits = 0.0, []
    # It takes longer to be made than the period, which is no time in which it was up.
    for lasts in (4.9,) * 7 + (5.0, 4.9):
        decision = siblings.failed("a", now, normal=False, now=now)
        assert isinstance(decision, Again)
        waits.append(decision.delay)
        siblings.came_up("a", now + decision.delay + 20)
        now += decision.delay + 20 + lasts
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 1]
    # One that cannot be made has not been up.
    for count in (2, 3):
        decision = siblings.failed("a", object(), normal=False, now=now)
        assert isinstance(decision, Again)
        assert decision.count == count
        now += 100


def test_the_end_of_a_process_with_several_siblings_is_one_death() -> None:
    siblings = family("one_for_one", dict.fromkeys("ab", "permanent"), intensity=1)
    process_ended = ValueError()
    for child in "ab":
        assert siblings.failed(child, process_ended, normal=False, now=0) == Again((), (child,), (), 1, 0)
    # The same error again is another failure.
    assert isinstance(siblings.failed("a", process_ended, normal=False, now=0), GiveUp)


def test_who_was_stopped_by_its_owner_is_left_alone() -> None:
    siblings = family("one_for_all", dict.fromkeys("abc", "permanent"))
    siblings.remove("b")
    assert siblings.failed("a", "died", normal=False, now=0) == Again(("c",), ("a", "c"), (), 1, 0)
    siblings.remove("c")
    assert siblings.down == ("a",)


class AnyHistory(RuleBasedStateMachine):
    """In every order of events, the limit holds in every window of time, and no child is forgotten."""

    @initialize(strategy=st.sampled_from(STRATEGIES), intensity=st.integers(0, 4), period=st.integers(1, 5))
    def begin(self, strategy: Strategy, intensity: int, period: int) -> None:
        self.strategy, self.intensity, self.period = strategy, intensity, period
        self.siblings = family(strategy, {}, intensity, period)
        self.now, self.numbers = 0, 0
        # In the order of their spawning.
        self.kinds: dict[str, Kind] = {}
        self.up: set[str] = set()
        self.deaths: list[tuple[int, int]] = []

    @rule(kind=st.sampled_from(KINDS))
    def spawn(self, kind: Kind) -> None:
        self.numbers += 1
        self.kinds[f"{self.numbers}"] = kind
        self.up.add(f"{self.numbers}")
        self.siblings.add(f"{self.numbers}", kind)

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.kinds)
    @rule(data=st.data())
    def stop(self, data: Any) -> None:
        child = data.draw(st.sampled_from(list(self.kinds)))
        self.siblings.remove(child)
        del self.kinds[child]
        self.up.discard(child)

    @precondition(lambda self: set(self.kinds) - self.up)
    @rule()
    def start_the_next(self) -> None:
        child = self.siblings.down[0]
        self.siblings.came_up(child, self.now)
        self.up.add(child)

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), normal=st.booleans())
    def fail(self, data: Any, normal: bool) -> None:
        child = data.draw(st.sampled_from(list(self.kinds)))
        kind, evidence = self.kinds[child], (self.now, len(self.deaths))
        decision = self.siblings.failed(child, evidence, normal=normal, now=self.now)
        self.up.discard(child)
        if kind == "temporary" or (kind == "transient" and normal):
            assert decision == Gone(child)
            del self.kinds[child]
            return
        self.deaths.append(evidence)
        recent = tuple(death for death in self.deaths if death[0] > self.now - self.period)
        if isinstance(decision, GiveUp):
            assert len(recent) == self.intensity + 1
            assert decision == GiveUp(self.down(), recent)
            self.kinds, self.up, self.deaths = {}, set(), []
            return
        assert isinstance(decision, Again)
        assert decision.count == len(recent) <= self.intensity
        self.check(child, decision)

    def check(self, child: str, decision: Again[str]) -> None:
        order = list(self.kinds)
        concerned = {"one_for_one": [child], "one_for_all": order, "rest_for_one": order[order.index(child) :]}
        stopped = [other for other in concerned[self.strategy] if other in self.up]
        assert list(decision.stop) == stopped[::-1]
        assert list(decision.gone) == [other for other in stopped[::-1] if self.kinds[other] == "temporary"]
        self.up -= set(stopped)
        for other in decision.gone:
            del self.kinds[other]
        assert decision.start == ((child,) if self.strategy == "one_for_one" else self.down())

    def down(self) -> tuple[str, ...]:
        return tuple(child for child in self.kinds if child not in self.up)

    @invariant()
    def no_child_is_forgotten(self) -> None:
        if hasattr(self, "siblings"):
            assert self.siblings.down == self.down()


def test_any_history() -> None:
    run_state_machine_as_test(AnyHistory, settings=settings(_quick, max_examples=100, stateful_step_count=30))


@_quick
@given(st.floats(0, 100), st.floats(1, 10), st.floats(0, 1000), st.floats(0, 1), st.integers(1, 5000), st.floats(0, 1))
def test_waits_grow_up_to_the_most_and_chance_only_shortens_them(
    base: float, factor: float, most: float, jitter: float, count: int, chance: float
) -> None:
    backoff = Backoff(base, factor, most, jitter)
    whole = backoff.delay(count)
    assert 0 <= whole * (1 - jitter) * 0.999 <= backoff.delay(count, chance) <= whole <= most
    assert whole <= backoff.delay(count + 1)


def test_the_default_waits() -> None:
    backoff = Backoff(jitter=0.5)
    assert [backoff.delay(count) for count in (1, 2, 3, 9, 10, 10_000)] == [0.1, 0.2, 0.4, 25.6, 30, 30]
    assert backoff.delay(1, 1.0) == 0.05
    assert [_NO_WAIT.delay(count, 0.3) for count in (7, 10_000)] == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kind": "mortal"}, "kind='mortal' is none of permanent, transient, temporary"),
        ({"strategy": "all"}, "strategy='all' is none of one_for_one"),
        ({"intensity": -1}, "intensity=-1: None or a number from 0 is needed"),
        ({"intensity": True}, "intensity=True"),
        ({"intensity": 1.5}, r"intensity=1\.5"),
        ({"period": 0}, "period=0: a positive number"),
        ({"period": float("inf")}, "period=inf"),
        ({"backoff": 0.5}, r"backoff=0\.5 is no Backoff"),
        ({"intensity": 9}, r"intensity=9 would never .* 6 restarts wait 6\.3 s in all, longer than period=5\."),
        (
            {"intensity": 9},
            r"Lower intensity to 5 or less, raise period above 83\.1, or lower backoff\.max",
        ),
        ({"intensity": 10, "period": 60}, r"Lower intensity to 9 or less, raise period above 81\.1,"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Restart(**wrong)


@pytest.mark.parametrize(
    "policy",
    [
        {"intensity": None, "backoff": Backoff(max=3600)},
        {"intensity": 5},
        {"intensity": 9, "period": 83.2},
        {"intensity": 10, "period": 81.2},
    ],
)
def test_the_numbers_that_a_refusal_names_are_accepted(policy: dict[str, Any]) -> None:
    Restart(**policy)


@pytest.mark.parametrize("wrong", [{"base": -1}, {"factor": 0.5}, {"max": "1"}, {"jitter": 1.1}, {"jitter": True}])
def test_a_backoff_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Backoff(**wrong)


def test_the_words_are_the_types() -> None:
    assert (get_args(Kind), get_args(Strategy)) == (KINDS, STRATEGIES)


def test_incarnations_have_different_ids_and_one_number() -> None:
    ids = {(number, epoch): incarnation(ActorId(number), epoch) for number, epoch in product((16, 1 << 31), (0, 1, 9))}
    assert len(set(ids.values())) == len(ids)
    for (number, epoch), actor in ids.items():
        assert (number_of(actor), epoch_of(actor)) == (number, epoch)
        assert incarnation(actor, epoch + 1) == incarnation(ActorId(number), epoch + 1)
    assert incarnation(ActorId(16), 0) == 16


async def streaming(self: Any) -> Any:
    yield self


@pytest.mark.parametrize(
    ("options", "fn", "why"),
    [
        ({"retries": 2}, lambda self: None, "`retries` needs `idempotent=True`"),
        ({"idempotent": True}, streaming, "is a stream: it cannot be made again"),
    ],
)
def test_retries_are_checked_where_they_are_said(options: dict[str, Any], fn: Callable[..., Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        aiodaft.method(**options)(fn)


def test_an_attempt_is_that_of_a_call() -> None:
    with pytest.raises(RuntimeError, match="no call runs here"):
        aiodaft.supervision.current_attempt()


def test_an_actors_own_policy_comes_before_that_of_its_scope_and_this_before_that_of_its_class() -> None:
    own, of_class, of_scope = Restart(intensity=1), Restart(intensity=2), Restart("transient", intensity=3)
    assert supervision_of(None, None, None) is None
    assert supervision_of(own, of_class, of_scope) == (own, "permanent", False)
    assert supervision_of(None, of_class, of_scope) == (of_scope, "transient", True)
    assert supervision_of("temporary", of_class, of_scope) == (of_scope, "temporary", True)
    assert supervision_of(None, of_class, None) == (of_class, "permanent", False)
    assert supervision_of("temporary", of_class, None) == (Restart("temporary", intensity=2), "temporary", False)
    assert supervision_of("transient", None, None) == (Restart("transient"), "transient", False)
