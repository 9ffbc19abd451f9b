"""The decision on a death: the actors that are restarted, the wait before that, and the end of all restarts. Pure.

The rules are those of OTP supervisors (https://www.erlang.org/doc/system/sup_princ.html): strategy, intensity,
period, and for each child whether it is permanent, transient or temporary. The back-off is an addition of ours.
"""

# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from aiodaft._protocol.ids import CallId, serial_of
from aiodaft._protocol.numbers import is_count, is_number

# The life of a supervised child, from the spawn of its first incarnation to the end of its last.
#
#     STARTING --MADE--> UP --FAILED--> DOWN --TURN--> STARTING
#         |              |                ^
#         |  RESTART     | RESTART        | STOPPED
#         +------------> LEAVING ---------+
#
# `NO_MORE` leads from UP to RETIRED and from DOWN to OVER. From STARTING and LEAVING, where a process has to be stopped
# first, it leads to ENDING, and from there to OVER.


class ChildState(enum.Enum):
    STARTING = "a process makes it"
    UP = "it takes calls, and is restarted when it dies"
    LEAVING = "it is stopped, and then started again with its siblings"
    ENDING = "it is stopped for good"
    DOWN = "it waits for its turn to be started"
    RETIRED = "it takes calls, and is not restarted"
    OVER = "it is gone for good"


class ChildEvent(enum.Enum):
    MADE = "its process has made it"
    FAILED = "it died, or could not be made"
    RESTART = "a sibling died, and is restarted together with it"
    DROP = "a sibling died; it is stopped with that one, and not restarted"
    NO_MORE = "its owner stops it, or its policy allows no more restarts"
    STOPPED = "its process has stopped it"
    TURN = "it is started again now"
    ENDED = "nothing is left of it"


_S: Final = ChildState
_E: Final = ChildEvent

TRANSITIONS: Final[dict[tuple[ChildState, ChildEvent], ChildState]] = {
    (_S.STARTING, _E.MADE): _S.UP,
    (_S.STARTING, _E.FAILED): _S.DOWN,
    # Made in vain: it is stopped when its process has made it.
    (_S.STARTING, _E.RESTART): _S.LEAVING,
    (_S.STARTING, _E.NO_MORE): _S.ENDING,
    (_S.UP, _E.FAILED): _S.DOWN,
    (_S.UP, _E.RESTART): _S.LEAVING,
    (_S.UP, _E.DROP): _S.ENDING,
    # Its owner stops it in its own turn; it takes calls until then.
    (_S.UP, _E.NO_MORE): _S.RETIRED,
    (_S.LEAVING, _E.MADE): _S.LEAVING,
    (_S.LEAVING, _E.RESTART): _S.LEAVING,
    (_S.LEAVING, _E.STOPPED): _S.DOWN,
    # It could not be made, and so there is nothing to stop.
    (_S.LEAVING, _E.FAILED): _S.DOWN,
    (_S.LEAVING, _E.NO_MORE): _S.ENDING,
    (_S.ENDING, _E.MADE): _S.ENDING,
    (_S.ENDING, _E.NO_MORE): _S.ENDING,
    (_S.ENDING, _E.STOPPED): _S.OVER,
    (_S.ENDING, _E.FAILED): _S.OVER,
    (_S.DOWN, _E.TURN): _S.STARTING,
    (_S.DOWN, _E.RESTART): _S.DOWN,
    # It has no process to stop.
    (_S.DOWN, _E.NO_MORE): _S.OVER,
    (_S.RETIRED, _E.NO_MORE): _S.RETIRED,
    **{(state, _E.ENDED): _S.OVER for state in _S},
}

# Its handles lead to its process.
REACHABLE: Final = frozenset({_S.UP, _S.RETIRED})
# Its process has to stop it.
STOPPING: Final = frozenset({_S.LEAVING, _S.ENDING})
# Its supervisor does nothing more with it.
SETTLED: Final = frozenset({_S.RETIRED, _S.OVER})


class Child(Protocol):
    state: ChildState
    due: float


OrderedT = TypeVar("OrderedT", bound=Child)


def next_task(children: Sequence[OrderedT]) -> tuple[OrderedT, float | None] | None:
    # All stop before the first starts.
    stopping = [child for child in children if child.state in STOPPING]
    if stopping:
        return stopping[-1], None
    down = [child for child in children if child.state is ChildState.DOWN]
    return (down[0], max(child.due for child in down)) if down else None


class Fate(enum.Enum):
    NOTHING = "it has no process, or its supervisor stops it"
    NOT_MADE = "its start has failed"
    RESTART = "its supervisor decides"
    OVER = "it is over"


def fate_of(state: ChildState, *, wanted: bool) -> Fate:
    if state is ChildState.STARTING:
        return Fate.NOT_MADE
    if state not in REACHABLE:
        return Fate.NOTHING
    return Fate.RESTART if state is ChildState.UP and not wanted else Fate.OVER


Kind: TypeAlias = Literal["permanent", "transient", "temporary"]
Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]

KINDS: Final = ("permanent", "transient", "temporary")
STRATEGIES: Final = ("one_for_one", "one_for_all", "rest_for_one")

ChildT = TypeVar("ChildT", bound=Hashable)
EvidenceT = TypeVar("EvidenceT")


@dataclass(frozen=True, slots=True)
class Backoff:
    """The wait before a restart: `base * factor ** (n - 1)` seconds for the n-th one that `Restart` counts.

    Attributes:
        base: Seconds before the first restart; 0 for no wait at all.
        factor: Each wait is longer than the one before by this factor.
        max: Seconds that no wait exceeds.
        jitter: Random part of each wait, 0 to 1, so that actors that died together are not restarted together.
    """

    base: float = 0.1
    factor: float = 2.0
    max: float = 30.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        for name, least, most in (
            ("base", 0, float("inf")), ("factor", 1, float("inf")), ("max", 0, float("inf")), ("jitter", 0, 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not is_number(value, least, most):
                raise ValueError(f"{name}={value!r}: a number from {least} to {most:g} is needed")

    def delay(self, count: int, chance: float = 0.0) -> float:
        """Seconds before the `count`-th restart; `chance` is from 0 to 1."""
        try:
            wait = min(self.max, self.base * self.factor ** (count - 1))
        except OverflowError:
            wait = self.max if self.base else 0.0
        return wait * (1 - self.jitter * chance)


@dataclass(frozen=True, slots=True)
class Restart:
    """The policy for the death of an actor: `rt.on(restart=Restart(intensity=3, period=60)).spawn(Model)`.

    A restart is a new process in the same slot (its resources and GPUs stay assigned): the constructor runs again
    with the original arguments, then the class's `on_restart(epoch)` if it has one. Calls that were under way fail
    with `ActorDied` and are never made again by themselves.

    A policy of an actor, in its class line or by `on`, applies to that actor alone. A policy of a scope applies to all
    actors spawned in that scope itself: siblings with one strategy and one count of restarts.

    Attributes:
        kind: "permanent" actors are always restarted; "transient" ones unless they ended with exit code 0;
            "temporary" ones never, and their death is no error of the scope.
        strategy: The actors to restart when one dies: "one_for_one" the dead actor; "one_for_all" all siblings;
            "rest_for_one" the dead actor and the siblings spawned after it. Siblings are started in the order in which
            they were spawned, and stopped in the reverse order.
        intensity: The restarts allowed within the period; one more is `RestartLimitReached`, an error of the scope,
            which cancels it. A `Runtime` logs the error, and raises it when its block ends. None: any number is
            allowed; those that wait longer and longer are the ones in a row.
        period: Seconds. With `intensity=None`, a row ends when the actor has been up for so long.
        backoff: The wait before a restart.
        follow: Whether handles lead to the new incarnation. Calls made while it starts wait for it. With False, handles
            of an earlier incarnation raise `StaleHandle`, and `rt.lookup(name, cls)` gives a new one.

    Raises:
        ValueError: A value is not allowed, or the backoff is so slow that the intensity is never reached.
    """

    kind: Kind = "permanent"
    strategy: Strategy = "one_for_one"
    intensity: int | None = 1
    period: float = 5.0
    backoff: Backoff = field(default_factory=Backoff)
    follow: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, KINDS), ("strategy", self.strategy, STRATEGIES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
        if self.intensity is not None and not is_count(self.intensity, 0):
            raise ValueError(f"intensity={self.intensity!r}: None or a number from 0 is needed")
        if not (is_number(self.period) and self.period):
            raise ValueError(f"period={self.period!r}: a positive number of seconds is needed")
        if not isinstance(self.backoff, Backoff):
            raise ValueError(f"backoff={self.backoff!r} is no Backoff")
        if self.intensity is not None:
            self._check_reachable(self.intensity)

    def _check_reachable(self, intensity: int) -> None:
        waits = 0.0
        for count in range(1, intensity + 1):
            waits += self.backoff.delay(count)
            if waits >= self.period:
                enough = waits + (intensity - count) * self.backoff.delay(intensity)
                raise ValueError(
                    f"intensity={intensity} would never be reached: with this backoff {count} restarts wait "
                    f"{waits:g} s in all, longer than period={self.period:g}. Lower intensity to {count - 1} or less, "
                    f"raise period above {enough:g}, or lower backoff.max (it is {self.backoff.max:g})"
                )


def check_alone(policy: Restart) -> Restart:
    if not isinstance(policy, Restart):
        raise TypeError(f"restart={policy!r:.80} is not an aiodaft.Restart")
    if policy.strategy != "one_for_one":
        raise ValueError(
            f"strategy={policy.strategy!r} is about siblings: give it to their scope, `rt.scope(restart=...)`"
        )
    return policy


class Supervision(NamedTuple):
    policy: Restart
    kind: Kind
    shared: bool


def supervision_of(
    own: Restart | Kind | None, of_class: Restart | None, of_scope: Restart | None
) -> Supervision | None:
    """The policy of an actor: its own, then that of its scope or class; None: it is not supervised."""
    if of_scope is not None and not isinstance(own, Restart):
        return Supervision(of_scope, own or of_scope.kind, shared=True)
    policy = own if isinstance(own, Restart) else of_class
    if isinstance(own, str):
        policy = replace(policy or Restart(), kind=own)
    return None if policy is None else Supervision(policy, policy.kind, shared=False)


class Gone(NamedTuple, Generic[ChildT]):
    """The child is not restarted, and no sibling is."""

    child: ChildT


@dataclass(frozen=True, slots=True)
class Again(Generic[ChildT]):
    """Stop `stop`, then start `start`, in these orders. `gone` is a part of `stop` that is not restarted."""

    stop: tuple[ChildT, ...]
    start: tuple[ChildT, ...]
    gone: tuple[ChildT, ...]
    count: int
    delay: float


class GiveUp(NamedTuple, Generic[ChildT, EvidenceT]):
    """`down` stay down. The evidence of each failure, oldest first."""

    down: tuple[ChildT, ...]
    evidence: tuple[EvidenceT, ...]


class Siblings(Generic[ChildT, EvidenceT]):
    """The actors that one policy watches, in the order in which they were spawned.

    A child is up until it has failed or its restart asks for its stop, and again when `came_up` says so.
    """

    def __init__(self, policy: Restart, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._children: dict[ChildT, Kind] = {}
        self._down: set[ChildT] = set()
        # Without a limit only the last one is of use.
        self._failures: deque[tuple[float, EvidenceT]] = deque(maxlen=1 if policy.intensity is None else None)
        self._in_a_row = 0
        self._up_since = 0.0
        self._failed_together: set[ChildT] = set()

    def add(self, child: ChildT, kind: Kind) -> None:
        self._children[child] = kind

    def remove(self, child: ChildT) -> None:
        self._children.pop(child, None)
        self._down.discard(child)

    def came_up(self, child: ChildT, now: float) -> None:
        self._down.discard(child)
        self._up_since = now

    @property
    def down(self) -> tuple[ChildT, ...]:
        return tuple(child for child in self._children if child in self._down)

    def failed(
        self, child: ChildT, evidence: EvidenceT, *, normal: bool, now: float, homeless: bool = False
    ) -> Gone[ChildT] | Again[ChildT] | GiveUp[ChildT, EvidenceT]:
        """A child ended by itself, or could not be started again.

        `normal`: with exit code 0. `homeless`: no process can make it again.
        """
        kind = self._children[child]
        if homeless or kind == "temporary" or (kind == "transient" and normal):
            self.remove(child)
            return Gone(child)
        lasted = child not in self._down and now - self._up_since >= self._policy.period
        self._down.add(child)
        if self._failures and self._failures[-1][1] is evidence and child not in self._failed_together:
            # The end of a process is one failure, however many of its actors are siblings.
            self._failed_together.add(child)
        else:
            self._failures.append((now, evidence))
            self._in_a_row = 1 if lasted else self._in_a_row + 1
            self._failed_together = {child}
        while self._failures and self._failures[0][0] <= now - self._policy.period:
            self._failures.popleft()
        limit = self._policy.intensity
        count = self._in_a_row if limit is None else len(self._failures)
        if limit is not None and count > limit:
            return self._give_up()
        stop = tuple(other for other in reversed(self._concerned(child)) if other not in self._down)
        gone = tuple(other for other in stop if self._children[other] == "temporary")
        self._down.update(stop)
        for other in gone:
            self.remove(other)
        start = (child,) if self._policy.strategy == "one_for_one" else self.down
        return Again(stop, start, gone, count, self._policy.backoff.delay(count, self._chance()))

    def _concerned(self, child: ChildT) -> list[ChildT]:
        children = list(self._children)
        if self._policy.strategy == "one_for_one":
            return [child]
        return children if self._policy.strategy == "one_for_all" else children[children.index(child) :]

    def _give_up(self) -> GiveUp[ChildT, EvidenceT]:
        decision = GiveUp(self.down, tuple(evidence for _, evidence in self._failures))
        self._children.clear()
        self._down.clear()
        self._failures.clear()
        return decision


# Calls that were made together. In `a, b = m.step(), n.step()` the code that awaits `b` does not run if `await a`
# raises: the error of the call, or the cancellation of a timeout. When `b` is dropped then, its error is no news to the
# program: it has an error of that task already.
# Times are numbers of calls: a later event in a process has a higher number.

Maker = TypeVar("Maker")

# If more awaits fail before a sibling is dropped, its error is reported after all.
_REMEMBERED: Final = 1024


class _Failed(NamedTuple, Generic[Maker]):
    maker: Maker
    call: CallId
    raised: int


class FailedAwaits(Generic[Maker]):
    def __init__(self) -> None:
        self._failed: deque[_Failed[Maker]] = deque(maxlen=_REMEMBERED)

    def note(self, maker: Maker, call: CallId, raised: int) -> None:
        self._failed.append(_Failed(maker, call, raised))

    def excuse(self, maker: Maker, call: CallId, failed: int, dropped: int) -> bool:
        """Whether the error of a call is no news, because the await of a sibling had failed before.

        A sibling is another call of the same task, its `maker`, under way at the same time.
        """
        made = serial_of(call)
        return any(
            one.maker == maker and one.call != call and serial_of(one.call) < failed and made < one.raised < dropped
            for one in self._failed
        )
