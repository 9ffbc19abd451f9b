"""Random numbers that depend on their place: equal for each placement of a tensor, and for one process.

The values of a draw are a function of (seed, step, number of the draw in the step, place in the whole tensor), by
Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WORD: Final = 0xFFFFFFFF
_CHUNK: Final = 1 << 14
"""Counters that are worked on at a time: their words stay in the cache of a core."""


def philox(counter: Sequence[torch.Tensor], key: tuple[int, int]) -> torch.Tensor:
    """The four words of each counter: int64 with words of 32 bits, as all that is given; the last dimension is 4."""
    c0, c1, c2, c3 = (one.clone() for one in counter)
    k0, k1 = key
    for _ in range(10):
        # int64 wraps: the lower 64 bits of a product are right, and so are its two words. c1 and c3 are masked late.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, c3 = p1, p0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1 & _WORD, c2, c3 & _WORD], dim=-1)


def draw(
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    parameters: Sequence[float],
    place: tuple[int, int, int],
    offset: Sequence[int] | None = None,
    local: Sequence[int] | None = None,
) -> torch.Tensor:
    """A random tensor, or the part of it that begins at `offset` and has the shape `local`.

    Args:
        kind: bernoulli (p), uniform (low, high), normal (mean, deviation), exponential (rate), integers (low, high), or
            bits (words of 32 bits).
        shape: That of the whole tensor, of less than 2**32 rows.
        parameters: Those of the kind, as above.
        place: The seed, the step, and the number of the draw among the draws of the step.
    """
    seed, step, number = place
    # A tensor is rows of blocks of four values: a counter has the block, the row, the number and the step.
    whole = tuple(shape) or (1,)
    offset = tuple(offset or ()) or (0,) * len(whole)
    local = tuple(shape if local is None else local)
    *leading, columns = local or (1,)
    rows = torch.zeros(1, dtype=torch.int64)
    for size, start, part in zip(whole[:-1], offset[:-1], leading, strict=True):
        rows = (rows[:, None] * size + torch.arange(start, start + part)).flatten()
    first, last = offset[-1] // 4, -(-(offset[-1] + columns) // 4)
    blocks = max(last - first, 0)
    values = torch.empty(len(rows) * blocks, 4, dtype=dtype)
    make = _KINDS[kind]
    key = (seed & _WORD, seed >> 32 & _WORD)
    for begin in range(0, len(values), _CHUNK):
        index = torch.arange(begin, min(begin + _CHUNK, len(values)))
        row, block = rows[index // blocks], index % blocks + first
        words = philox([block, row, torch.full_like(row, number), torch.full_like(row, step)], key)
        values[begin : begin + len(index)] = make(words, dtype, *parameters)
    begin = offset[-1] - 4 * first
    return values.view(len(rows), 4 * blocks)[:, begin : begin + columns].reshape(local)


def _uniform(words: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    # As many bits as the dtype has: rounding would give `high` itself.
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float64: 32}.get(dtype, 24)
    unit = (words >> 32 - bits).to(torch.float64).mul_(2.0**-bits)
    return unit.mul_(high - low).add_(low)


def _normal(words: torch.Tensor, dtype: torch.dtype, mean: float, deviation: float) -> torch.Tensor:
    # Box and Muller, in float64: what is left of it does not depend on the vectors of the machine.
    unit = (words.to(torch.float64) + 1).mul_(2.0**-32)
    radius, angle = unit[..., ::2].log().mul_(-2).sqrt_(), unit[..., 1::2] * (2 * math.pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2).mul_(deviation).add_(mean)


def _exponential(words: torch.Tensor, dtype: torch.dtype, rate: float) -> torch.Tensor:
    return (words.to(torch.float64) + 1).mul_(2.0**-32).log_().div_(-rate)


def _bernoulli(words: torch.Tensor, dtype: torch.dtype, p: float) -> torch.Tensor:
    return words < round(p * 2**32)


def _integers(words: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    if not 0 < high - low <= 2**31:
        raise ValueError(f"random integers are drawn from 1 to 2**31 values, not from [{int(low)}, {int(high)})")
    return (words * int(high - low) >> 32) + int(low)


_KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "bernoulli": _bernoulli,
    "uniform": _uniform,
    "normal": _normal,
    "exponential": _exponential,
    "integers": _integers,
    "bits": lambda words, dtype: words,
}

_library: Any = torch.library.Library("aiodaft", "FRAGMENT")  # type: ignore[no-untyped-call]  # of torch
_library.define(
    "random(str kind, int[] shape, ScalarType dtype, float[] parameters, Scalar seed, Scalar step, int number, "
    "int[]? offset=None, int[]? local=None) -> Tensor"
)


def _random(
    kind: str, shape: Any, dtype: torch.dtype, parameters: Any, seed: Any, step: Any, number: int, *rest: Any
) -> Any:
    return draw(kind, shape, dtype, parameters, (int(seed), int(step), number), *rest)


_library.impl("random", _random, "CompositeExplicitAutograd")


class Drawing(Protocol):
    def draw(self, kind: str, shape: Sequence[int], dtype: torch.dtype, *parameters: float) -> torch.Tensor: ...

    def fill(self, tensor: torch.Tensor, kind: str, *parameters: float) -> torch.Tensor: ...


def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def drawn(mode: Drawing, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a random operation of torch, with the draws of a mode; None if it draws nothing this time."""
    arguments = func._schema.arguments
    # The default of a dtype is a number of C++, and the rules have it.
    given = {one.name: one.default_value for one in arguments if one.has_default_value() and one.name != "dtype"}
    given.update(zip((one.name for one in arguments), args, strict=False))
    given.update(kwargs)
    if given.get("dropout_p", given.get("dropout")) == 0:
        return None
    if (rule := _RULES.get(func._opname)) is None:
        raise NotImplementedError(f"{func} has no counter-based form: draw with rand, randn or bernoulli")
    return rule(mode, given)


def _filled(kind: str, *names: str) -> Callable[[Drawing, dict[str, Any]], Any]:
    return lambda mode, given: mode.fill(given["self"], kind, *(given.get(name) or 0 for name in names))


def _made(kind: str, default: torch.dtype | None, *parameters: Any) -> Callable[[Drawing, dict[str, Any]], Any]:
    def rule(mode: Drawing, given: dict[str, Any]) -> Any:
        like = given.get("self")
        dtype = given.get("dtype") or (like.dtype if like is not None else default or torch.get_default_dtype())
        values = [given.get(one, 0) if isinstance(one, str) else one for one in parameters]
        return mode.draw(kind, given["size"] if like is None else like.shape, dtype, *values)

    return rule


def _bernoulli_rule(mode: Drawing, given: dict[str, Any]) -> Any:
    tensor, p = given["self"], given.get("p")
    if isinstance(p, float):
        return mode.draw("bernoulli", tensor.shape, tensor.dtype, p)
    return (mode.draw("uniform", tensor.shape, torch.float32, 0.0, 1.0) < tensor).to(tensor.dtype)


def _bernoulli_in_place(mode: Drawing, given: dict[str, Any]) -> Any:
    tensor, p = given["self"], given["p"]
    if isinstance(p, torch.Tensor):
        return tensor.copy_(mode.draw("uniform", tensor.shape, torch.float32, 0.0, 1.0) < p)
    return mode.fill(tensor, "bernoulli", p)


def _dropout(mode: Drawing, given: dict[str, Any]) -> Any:
    tensor, p = given["input"], given["p"]
    if given["train"] is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = mode.draw("bernoulli", tensor.shape, torch.bool, 1 - p)
    return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _permutation(mode: Drawing, given: dict[str, Any]) -> Any:
    order = mode.draw("bits", (given["n"],), torch.int64).sort(stable=True).indices
    return order.to(given.get("dtype") or torch.int64)


_RULES: dict[str, Callable[[Drawing, dict[str, Any]], Any]] = {
    "uniform_": _filled("uniform", "from", "to"),
    "normal_": _filled("normal", "mean", "std"),
    "exponential_": _filled("exponential", "lambd"),
    "random_": _filled("integers", "from", "to"),
    "rand": _made("uniform", None, 0.0, 1.0),
    "rand_like": _made("uniform", None, 0.0, 1.0),
    "randn": _made("normal", None, 0.0, 1.0),
    "randn_like": _made("normal", None, 0.0, 1.0),
    "randint": _made("integers", torch.int64, "low", "high"),
    "randint_like": _made("integers", None, "low", "high"),
    "bernoulli": _bernoulli_rule,
    "bernoulli_": _bernoulli_in_place,
    "native_dropout": _dropout,
    "randperm": _permutation,
}


@contextmanager
def numbered(counted: Any) -> Generator[None]:
    """Draws are numbered by `counted.draws`; recomputation, which asks torch for its state, draws the same again."""
    saved = torch.get_rng_state, torch.set_rng_state
    torch.get_rng_state = lambda: counted.draws  # no tensor, but all that recomputation wants
    torch.set_rng_state = lambda new_state: setattr(counted, "draws", new_state)
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = saved


class _Draws(TorchDispatchMode):
    def __init__(self, seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.seed, self.step, self.draws = seed, step, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_ours = is_random(func) and not any(getattr(one, "draws_itself", False) for one in types)
        result = drawn(self, func, args, kwargs or {}) if is_ours else None
        return func(*args, **(kwargs or {})) if result is None else result

    def draw(self, kind: str, shape: Sequence[int], dtype: torch.dtype, *parameters: float) -> torch.Tensor:
        return draw(kind, shape, dtype, parameters, self.next_place())

    def next_place(self) -> tuple[int, int, int]:
        self.draws += 1
        return self.seed, self.step, self.draws - 1

    def fill(self, tensor: torch.Tensor, kind: str, *parameters: float) -> torch.Tensor:
        return tensor.copy_(self.draw(kind, tensor.shape, tensor.dtype, *parameters))


_ACTIVE: ContextVar[_Draws | None] = ContextVar("draws", default=None)


def next_place() -> tuple[int, int, int]:
    """Seed, step and number of the next draw: those of `manual_seed`, or else a seed of torch's own generator."""
    mode = _ACTIVE.get()
    return (int(torch.empty((), dtype=torch.int64).random_()), 0, 0) if mode is None else mode.next_place()


@contextmanager
def manual_seed(seed: int, step: int = 0) -> Generator[None]:
    """In this block, torch draws the random numbers that a program with this seed draws in this step.

    for step, (x, y) in enumerate(batches):
        with manual_seed(7, step):
            train(model, optimizer, x, y)
    """
    mode = _Draws(seed, step)
    token = _ACTIVE.set(mode)
    try:
        with numbered(mode), mode:
            yield
    finally:
        _ACTIVE.reset(token)
