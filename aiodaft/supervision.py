"""Restart policies, in the words of OTP supervisors."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiodaft._protocol.supervision import KINDS, STRATEGIES, Backoff, Kind, Strategy

__all__ = ["Backoff", "Kind", "Restart", "Strategy"]


@dataclass(frozen=True, slots=True)
class Restart:
    """What happens when an actor dies: `rt.on(restart=Restart(intensity=3, period=60)).spawn(Model)`.

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
            which cancels it. A `Runtime` logs the error, and raises it when its block ends.
        period: Seconds.
        backoff: The wait before a restart.
        follow: Whether handles lead to the new incarnation. Calls made while it starts wait for it. With False, handles
            of an earlier incarnation raise `StaleHandle`, and `rt.rebind(handle)` gives a new one.

    Raises:
        ValueError: A value is not allowed, or the backoff is so slow that the intensity is never reached.
    """

    kind: Kind = "permanent"
    strategy: Strategy = "one_for_one"
    intensity: int = 1
    period: float = 5.0
    backoff: Backoff = field(default_factory=Backoff)
    follow: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, KINDS), ("strategy", self.strategy, STRATEGIES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
        if isinstance(self.intensity, bool) or not isinstance(self.intensity, int) or self.intensity < 0:
            raise ValueError(f"intensity={self.intensity!r}: a number of restarts that is not negative is needed")
        if not isinstance(self.period, int | float) or not 0 < self.period < float("inf"):
            raise ValueError(f"period={self.period!r}: a positive number of seconds is needed")
        if not isinstance(self.backoff, Backoff):
            raise ValueError(f"backoff={self.backoff!r} is no Backoff")
        waits = 0.0
        for count in range(1, self.intensity + 1):
            waits += self.backoff.delay(count)
            if waits >= self.period:
                enough = waits + (self.intensity - count) * self.backoff.delay(self.intensity)
                raise ValueError(
                    f"intensity={self.intensity} would never be reached: with this backoff {count} restarts wait "
                    f"{waits:g} s in all, longer than period={self.period:g}. Lower intensity to {count - 1} or less, "
                    f"raise period above {enough:g}, or lower backoff.max (it is {self.backoff.max:g})"
                )


def check_alone(policy: Restart) -> Restart:
    """Return a policy that fits a single actor.

    Raises:
        TypeError: It is no policy.
        ValueError: Its strategy is about siblings.
    """
    if not isinstance(policy, Restart):
        raise TypeError(f"restart={policy!r:.80} is not an aiodaft.Restart")
    if policy.strategy != "one_for_one":
        raise ValueError(
            f"strategy={policy.strategy!r} is about siblings: give it to their scope, `rt.scope(restart=...)`"
        )
    return policy
