"""When a silent process is suspected, and when it is given up (D60, D61, D69 of the fault tests), in virtual time."""

from __future__ import annotations

import random

import pytest

from aiodaft._protocol.node.worker import Answer, Health, LastHeartbeat, Liveness, Order, Patience, Stalls

PATIENCE = Patience()
FOREVER = float("inf")

# A few in the suite; thousands by `pytest -m soak`.
many_seeds = pytest.mark.parametrize(
    "seeds", [pytest.param(range(100), id="100"), pytest.param(range(100, 3000), id="3000", marks=pytest.mark.soak)]
)


class World:
    """A watcher and a process, either of which may be held up for a while; messages take their time."""

    def __init__(self, seed: int, patience: Patience = PATIENCE, *, stops: bool = True) -> None:
        # Whether the process is stopped while it does nothing; else C code keeps its interpreter.
        self.stops = stops
        self.rng = random.Random(seed)
        self.liveness = Liveness(patience, 0.0)
        self.orders: list[tuple[float, Order]] = []
        # During these the watcher, or the process, does nothing.
        self.watcher_away: list[tuple[float, float]] = []
        self.process_away: list[tuple[float, float]] = []

    def latency(self) -> float:
        return self.rng.expovariate(1000)

    def run(self, until: float) -> None:
        liveness, answer = self.liveness, FOREVER
        while (due := liveness.get_timer()) is not None:
            now = later(self.watcher_away, min(due + self.latency(), answer))
            if now > until:
                return
            # Answers that arrived while it was away are read first.
            if answer <= now:
                answer = FOREVER
                self.note(now, liveness.heard(now))
            stopped = self.stops and later(self.process_away, now) != now
            order = liveness.handle_timer(now, stopped=stopped)
            if order is Order.ASK:
                answer = later(self.process_away, now + self.latency()) + self.latency()
            else:
                self.note(now, order)

    def note(self, now: float, order: Order | None) -> None:
        if order is not None:
            self.orders.append((now, order))

    def names(self) -> list[str]:
        return [order.name for _, order in self.orders]

    def first(self, kind: Order) -> float:
        return next(when for when, order in self.orders if order is kind)


def later(pauses: list[tuple[float, float]], when: float) -> float:
    """The first moment from `when` on that is in no pause."""
    for begin, end in pauses:
        if begin <= when < end:
            when = end
    return when


def pauses(rng: random.Random, longest: float, until: float) -> list[tuple[float, float]]:
    """Pauses with time in between to answer, each shorter than `longest`."""
    found: list[tuple[float, float]] = []
    begin = rng.uniform(0, 10)
    while begin < until:
        end = begin + rng.uniform(0, longest)
        found.append((begin, end))
        begin = end + rng.uniform(2, 20)
    return found


@many_seeds
@pytest.mark.parametrize("watcher", [0.0, 2.0, 120.0], ids=["awake", "often away", "away for minutes"])
def test_d69_pauses_shorter_than_the_patience_never_count_as_death(seeds: range, watcher: float) -> None:
    for seed in seeds:
        world = World(seed) if seed % 2 else World(seed, Patience(give_up=30), stops=False)
        rng = world.rng
        world.process_away = pauses(rng, 29.9, 500)
        world.watcher_away = pauses(rng, watcher, 500) if watcher else []
        world.run(500)
        assert world.liveness.health is not Health.LOST, f"seed {seed}: {world.orders} of {world.process_away}"
        assert "GIVE_UP" not in world.names()


@many_seeds
@pytest.mark.parametrize("watcher", [0.0, 120.0], ids=["awake", "away for minutes"])
def test_d69_pauses_shorter_than_the_suspicion_are_not_even_reported(seeds: range, watcher: float) -> None:
    for seed in seeds:
        world = World(seed)
        rng = world.rng
        world.process_away = pauses(rng, 4.9, 500)
        world.watcher_away = pauses(rng, watcher, 500) if watcher else []
        world.run(500)
        assert world.orders == [], f"seed {seed} of {world.process_away}"


@many_seeds
def test_d69_a_machine_that_sleeps_is_no_death(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        world.watcher_away = pauses(world.rng, 300, 1000)
        # The process falls asleep a little earlier than its watcher, and goes on a little later.
        drift = world.rng.uniform
        world.process_away = [(begin - drift(0, 1), end + drift(0, 1)) for begin, end in world.watcher_away]
        world.run(1000)
        assert world.orders == [], f"seed {seed} of {world.watcher_away}"


@many_seeds
def test_d69_what_never_answers_again_is_always_found_and_in_time(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        stopped = rng.uniform(0, 100)
        suspect, lost = rng.choice([None, 0.3, 2, 5]), rng.choice([1.0, 7.3, 30, 100])
        stops = rng.random() < 0.5
        patience = Patience(suspect, lost) if stops else Patience(suspect, give_up=lost)
        world = World(seed, patience, stops=stops)
        world.process_away = [(stopped, FOREVER)]
        world.run(1000)
        given_up = world.first(Order.GIVE_UP) - stopped
        assert lost - 0.1 <= given_up <= lost * 1.1 + 3, f"seed {seed}: {world.orders} of {patience}"
        if suspect is not None and suspect < lost:
            reported = world.first(Order.SUSPECT) - stopped
            assert suspect - 0.1 <= reported <= suspect * 1.2 + 2, f"seed {seed}: {world.orders} of {patience}"


@many_seeds
def test_d69_a_watcher_that_is_often_away_finds_it_later_and_finds_it(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        rng = world.rng
        world.process_away = [(rng.uniform(0, 100), FOREVER)]
        world.watcher_away = pauses(rng, 10.0, 5000)
        world.run(5000)
        # After 5, 10 and 20 s, and 30 s.
        assert world.names() == ["SUSPECT", "SUSPECT", "SUSPECT", "GIVE_UP"], f"seed {seed}"


@many_seeds
def test_d61_c_code_is_reported_at_growing_intervals_and_never_given_up(seeds: range) -> None:
    for seed in seeds:
        world = World(seed, stops=False)
        began = world.rng.uniform(0, 100)
        world.process_away = [(began, FOREVER)]
        world.run(750)
        assert set(world.names()) == {"SUSPECT"}, f"seed {seed}"
        silences = [when - began for when, _ in world.orders]
        assert len(silences) == 8, f"seed {seed}: {silences}"
        for number, silence in enumerate(silences):
            assert 5 * 2**number - 0.1 <= silence <= 5 * 2**number * 1.01 + 2, f"seed {seed}: {silences}"


def test_d61_only_the_time_for_which_a_process_is_stopped_counts_against_it() -> None:
    liveness = Liveness(Patience(None, 1), 0.0)
    steps = iter(range(1000))

    def look(*, stopped: bool) -> Order | None:
        return liveness.handle_timer(next(steps) * 0.2, stopped=stopped)

    assert look(stopped=False) is Order.ASK
    assert liveness.is_silent
    assert {look(stopped=False) for _ in range(100)} == {None}
    assert {look(stopped=True) for _ in range(4)} == {None}
    assert look(stopped=False) is None
    assert [look(stopped=True) for _ in range(5)] == [None, None, None, None, Order.GIVE_UP]
    assert liveness.limit == "lost_after=1"


def test_d60_a_process_that_goes_on_in_time_is_cleared_once() -> None:
    world = World(0)
    world.process_away = [(10.0, 19.0), (40.0, 49.0)]
    world.run(100)
    assert world.names() == ["SUSPECT", "CLEAR"] * 2


def test_what_keeps_a_loop_from_turning_is_reported_at_growing_pauses() -> None:
    stalls = Stalls()
    # Blocks for 100 s, is looked at each second; and another one, later.
    reported = [second for second in range(100) if stalls.is_due("Model.step", float(second), float(second))]
    assert reported == [1, 6, 16, 36, 76]
    assert stalls.is_due("Model.load", 1.0, 80.0)
    # Again, for less than a second, and for longer before the pause is over; then once it is.
    assert not stalls.is_due("Model.step", 0.9, 200.0)
    assert not stalls.is_due("Model.step", 5.0, 155.0)
    assert stalls.is_due("Model.step", 1.0, 156.0)


def test_what_was_given_up_stays_given_up() -> None:
    liveness = Liveness(Patience(None, None, 1), 0.0)
    orders = [liveness.handle_timer(step * 0.25) for step in range(10)]
    assert orders.count(Order.GIVE_UP) == 1
    assert liveness.limit == "give_up=1"
    assert (liveness.heard(3.0), liveness.health, liveness.get_timer()) == (None, Health.LOST, None)
    assert liveness.handle_timer(4.0) is None
    assert liveness.last_heard == 0.0


def test_none_switches_it_off() -> None:
    assert Liveness(Patience(None, None), 0.0).get_timer() is None
    only_suspected = Liveness(Patience(1, None), 0.0)
    orders = {only_suspected.handle_timer(float(second)) for second in range(1000)}
    assert orders == {Order.ASK, Order.SUSPECT, None}
    assert only_suspected.get_timer() is not None


def test_a_look_that_comes_early_counts_for_nothing() -> None:
    liveness = Liveness(PATIENCE, 0.0)
    assert liveness.handle_timer(0.0) is Order.ASK
    assert {liveness.handle_timer(0.9) for _ in range(1000)} == {None}
    assert liveness.health is Health.ALIVE


def test_who_lives_with_a_patient_actor_is_waited_for_as_long() -> None:
    assert Patience(1, 60).widened(Patience(5, 30)) == Patience(5, 60)
    assert Patience(None, 3).widened(Patience(5, None)) == Patience(None, None)
    assert Patience(give_up=3).widened(Patience(give_up=5)) == Patience(give_up=5)
    assert Patience(give_up=3).widened(Patience()) == Patience()
    liveness = Liveness(Patience(None, None, 1), 0.0)
    for step in range(5):
        assert liveness.handle_timer(step * 0.2) in (None, Order.ASK)
    liveness.relax(Patience(None, None, 10))
    assert liveness.patience == Patience(None, None, 10)
    orders = [liveness.handle_timer(float(second)) for second in range(1, 20)]
    assert orders.index(Order.GIVE_UP) == 9


@pytest.mark.parametrize("value", [0, -1, 0.01, float("inf"), float("nan"), "5"])
def test_a_patience_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="suspect_after=.*at least 0.1 seconds"):
        Patience(suspect_after=value)  # type: ignore[arg-type]


def test_an_answer_travels_as_bytes_and_long_texts_end_early() -> None:
    answer = Answer(0.5, 2.0, "Model.step", "Model.load of Model-1", "model.py:7 in load")
    assert Answer.unpack(answer.pack()) == answer
    long = Answer.unpack(Answer(1.0, 2.0, "m" * 999, "c" * 999, "l" * 999).pack())
    assert long == Answer(1.0, 2.0, "m" * 200, "c" * 200, "l" * 500)
    assert Answer.unpack(answer.pack()[:15]) is None
    # Texts that are missing are empty, and others are ignored.
    assert Answer.unpack(answer.pack()[:16]) == Answer(0.5, 2.0)
    assert Answer.unpack(Answer().pack() + b"\0more\0texts") == Answer()
    assert Answer.unpack(Answer(method="\udcff").pack()) == Answer(method="\\udcff")


def test_the_last_answer_ages() -> None:
    process = Liveness(Patience(suspect_after=5), 0.0)
    assert process.last(3.0) == LastHeartbeat(silent_for=3.0)
    process.heard(10.0)
    process.take(Answer(0.5, 2.0, "Model.step"), 10.0)
    assert process.last(11.0) == LastHeartbeat(False, 1.0, 0.5, "Model.step", 3.0)
    process.take(Answer(), 10.0)
    assert process.last(11.0).last_method_for == 0


def test_a_blocked_loop_is_reported_if_its_line_is_known_and_warnings_are_wanted() -> None:
    blocked = Answer(2.0, line="model.py:7 in load")
    assert Liveness(Patience(), 0.0).take(blocked, 1.0)
    assert not Liveness(Patience(), 0.0).take(blocked._replace(line=""), 1.0)
    assert not Liveness(Patience(suspect_after=None), 0.0).take(blocked, 1.0)
