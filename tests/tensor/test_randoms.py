"""Random numbers that depend on their place: the same for each cut of a tensor and for one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aiodaft.tensor.randoms import draw, manual_seed, philox  # noqa: E402

# Counter, key and result of Philox 4x32-10, from the file kat_vectors of Random123.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KINDS = {
    "bernoulli": (0.3,),
    "uniform": (-1.0, 2.0),
    "normal": (1.0, 2.0),
    "exponential": (2.0,),
    "integers": (-3, 9),
    "bits": (),
}


def words(text: str) -> list[int]:
    return [int(one, 16) for one in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_words(counter: str, key: str, result: str) -> None:
    first, second = words(key)
    assert philox([torch.tensor(one) for one in words(counter)], (first, second)).tolist() == words(result)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_the_same_part_of_the_whole_draw(kind: str) -> None:
    shape = (3, 5, 11)
    dtype = torch.int64 if kind in ("integers", "bits") else torch.float32
    whole = draw(kind, shape, dtype, KINDS[kind], (7, 2, 5))
    cuts = [(0, 3), (2, 3), (1, 1), (4, 11), (0, 0)]
    for rows, columns in itertools.product(cuts, cuts):
        (a, b), (c, d) = (min(rows[0], 5), min(rows[1], 5)), columns
        part = draw(kind, shape, dtype, KINDS[kind], (7, 2, 5), (1, a, c), (2, b - a, d - c))
        assert torch.equal(part, whole[1:, a:b, c:d])


def test_draws_larger_than_a_chunk_and_draws_of_one_value_have_the_same_parts() -> None:
    whole = draw("uniform", (140_000,), torch.float32, (0.0, 1.0), (1, 0, 0))
    assert torch.equal(
        draw("uniform", (140_000,), torch.float32, (0.0, 1.0), (1, 0, 0), (131_071,), (9,)), whole[131_071:][:9]
    )
    assert draw("normal", (), torch.float64, (0.0, 1.0), (1, 0, 0)).shape == ()


def test_seed_step_and_number_each_make_other_draws() -> None:
    draws = [draw("bits", (64,), torch.int64, (), one) for one in itertools.product((0, 1, 1 << 32), (0, 1), (0, 1))]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))


@pytest.mark.parametrize(
    ("kind", "mean", "variance"),
    [
        ("bernoulli", 0.3, 0.21),
        ("uniform", 0.5, 0.75),
        ("normal", 1.0, 4.0),
        ("exponential", 0.5, 0.25),
        ("integers", 2.5, 143 / 12),
    ],
)
def test_draws_have_the_moments_of_their_distribution(kind: str, mean: float, variance: float) -> None:
    count = 40_000
    values = draw(kind, (count,), torch.float64, KINDS[kind], (3, 0, 0))
    assert abs(values.mean().item() - mean) < 5 * (variance / count) ** 0.5
    assert abs(values.var().item() / variance - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_uniform_values_stay_below_their_upper_end(dtype: Any) -> None:
    values = draw("uniform", (20_000,), dtype, (0.0, 1.0), (3, 0, 0))
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1


def test_a_seed_and_a_step_give_torch_the_same_draws_again() -> None:
    def draws() -> list[Any]:
        x = torch.ones(4, 6)
        drawn = [torch.rand(3), torch.randn_like(x), torch.randint(2, 7, (5,)), torch.nn.functional.dropout(x, 0.5)]
        return [*drawn, torch.randperm(6), torch.bernoulli(x / 2), torch.empty(3).exponential_()]

    with manual_seed(7, step=1):
        first = draws()
    with manual_seed(7, step=1):
        second = draws()
    with manual_seed(7, step=2):
        third = draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    assert torch.equal(first[0], draw("uniform", (3,), torch.float32, (0.0, 1.0), (7, 1, 0)))
    assert torch.equal(first[1], draw("normal", (4, 6), torch.float32, (0.0, 1.0), (7, 1, 1)))
    assert first[4].sort().values.tolist() == list(range(6))


def test_recomputation_draws_the_same() -> None:
    layer = torch.nn.Dropout(0.5)
    x = torch.ones(64, requires_grad=True)
    with manual_seed(0):
        y = torch.utils.checkpoint.checkpoint(lambda x: layer(x) * x, x, use_reentrant=False)
        y.sum().backward()
    assert torch.equal(x.grad, 2 * y.detach())


def test_an_operation_without_a_counter_based_form_is_refused() -> None:
    with manual_seed(0), pytest.raises(NotImplementedError, match="cauchy_.*no counter-based form"):
        torch.empty(3).cauchy_()
    with pytest.raises(ValueError, match=r"from 1 to 2\*\*31 values"):
        draw("integers", (3,), torch.int64, (0, 1 << 40), (0, 0, 0))
