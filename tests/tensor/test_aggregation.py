"""Robust means, codecs with error feedback, and gradient codes (rows FT2, TR8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from aiodaft.tensor.aggregation import (
    Code,
    Codec,
    Encoder,
    GradientCode,
    Int8,
    LowRank,
    Ternary,
    TopK,
    flag_median,
    median,
    total,
    trimmed_mean,
)


def made(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_medians_and_trimmed_means_leave_out_what_is_far_away() -> None:
    rows = [torch.tensor([1.0, -3.0]), torch.tensor([2.0, torch.inf]), torch.tensor([1e9, 5.0])]
    assert median(rows).tolist() == [2.0, 5.0]
    assert median([*rows, torch.zeros(2)]).tolist() == [1.5, 2.5]
    assert trimmed_mean([torch.tensor(float(one)) for one in (9, 1, 2, 3, -50)], 1) == 2.0
    assert trimmed_mean(rows[:1], 0).tolist() == [1.0, -3.0]
    with pytest.raises(ValueError, match="trim=2 at both ends leaves nothing of 4 values"):
        trimmed_mean([torch.zeros(1)] * 4, 2)


@pytest.mark.parametrize("dimension", [1, 3])
def test_a_flag_median_has_the_direction_of_the_many(dimension: int) -> None:
    true = made(0, 30, 40)
    good = [true + 0.3 * made(seed, 30, 40) for seed in range(1, 6)]
    values = [*good[:3], -100 * true, 1e6 * made(7, 30, 40), *good[3:]]

    def alike(found: Tensor) -> float:
        return torch.cosine_similarity(found.flatten(), true.flatten(), 0).item()

    found = flag_median(values, dimension)
    assert alike(torch.stack(values).mean(0)) < 0.1
    assert alike(found) > 0.95
    assert 0.5 < found.norm() / true.norm() < 1.1
    with pytest.raises(ValueError, match="a subspace of 7 values has no dimension 8"):
        flag_median(values, 8)


# 7000 elements.
@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [(Int8(), 7000 + 4), (TopK(0.01), 8 * 70), (Ternary(), 7000 // 5 + 4), (LowRank(4), 4 * 4 * (100 + 70))],
)
def test_a_code_has_the_bytes_of_its_codec_and_loses_nothing_in_the_long_run(codec: Codec, nbytes: int) -> None:
    encoder, value, steps = Encoder(codec), made(1, 100, 70), 300
    codes = [encoder.encode(value) for _ in range(steps)]
    assert {(code.nbytes, code.decode().shape, code.decode().dtype) for code in codes} == {
        (nbytes, value.shape, value.dtype)
    }
    # The sum of all codes lacks only what the last one has left out.
    lost = steps * value - reduce(torch.add, [code.decode() for code in codes])
    assert lost.norm() < 0.25 * steps * value.norm()
    torch.testing.assert_close(encoder.encode(-lost).decode(), torch.zeros_like(value), rtol=0, atol=1e-2)


def test_codes_are_those_that_their_codecs_promise() -> None:
    value = torch.tensor([0.0, -254.0, 3.1, 100.0, 0.0, 0.0, -80.0])
    assert Encoder(Int8()).encode(value).decode().tolist() == [0, -254, 4, 100, 0, 0, -80]
    assert Encoder(TopK(0.3)).encode(value).decode().tolist() == [0, -254, 0, 100, 0, 0, 0]
    assert Encoder(TopK(0.01)).encode(value.bfloat16()).decode().dtype == torch.bfloat16
    found = Encoder(Ternary()).encode(value).decode().tolist()
    assert found == [0, pytest.approx(-434 / 3), 0, pytest.approx(434 / 3), 0, 0, pytest.approx(-434 / 3)]
    matrix = made(1, 6, 2) @ made(2, 2, 9)
    torch.testing.assert_close(Encoder(LowRank(2)).encode(matrix.view(6, 3, 3)).decode().flatten(1), matrix)
    assert torch.equal(Encoder(LowRank(2)).encode(value).decode(), value)
    for codec in (Int8(), Ternary(), TopK(1.0)):
        assert torch.equal(Encoder(codec).encode(torch.zeros(3, 4)).decode(), torch.zeros(3, 4))


def test_a_code_is_that_of_the_tensor_as_it_was() -> None:
    for codec in (Int8(), TopK(1.0), Ternary(), LowRank(1)):
        encoder, gradient = Encoder(codec), torch.ones(4)
        codes = []
        for step in (1, 2):
            codes.append(encoder.encode(gradient.fill_(step)))
            gradient.zero_()
        assert [code.decode().tolist() for code in codes] == [[1.0] * 4, [2.0] * 4], codec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_matrix_of_low_rank_has_a_code_whatever_the_values_before_were(dtype: torch.dtype) -> None:
    def at(row: int, column: int) -> Tensor:
        return torch.zeros(4, 3, dtype=dtype).index_put_(
            (torch.tensor(row), torch.tensor(column)), torch.tensor(2.0, dtype=dtype)
        )

    encoder = Encoder(LowRank(1))
    # Without anything, and in directions that the one before has not.
    for value in (torch.zeros(4, 3, dtype=dtype), at(1, 1), at(2, 2), at(3, 0)):
        code = encoder.encode(value)
        assert {part.dtype for part in code.parts} == {dtype}
        torch.testing.assert_close(code.decode(), value, rtol=0.01, atol=0.01)


def test_wrong_values_and_codecs_are_refused_and_leave_the_encoder_as_it_was() -> None:
    encoder = Encoder(Ternary())
    code = encoder.encode(value := made(1, 5))
    left = value - code.decode()
    with pytest.raises(ValueError, match=r"this encoder is for a tensor of \[5\], not \[5, 1\]"):
        encoder.encode(value.unsqueeze(1))
    for bad in (torch.full((5,), torch.nan), torch.full((5,), torch.inf)):
        with pytest.raises(ValueError, match=r"the tensor of \[5\] is empty or not finite"):
            encoder.encode(bad)
    assert torch.equal(encoder.encode(value).decode(), Encoder(Ternary()).encode(value + left).decode())
    with pytest.raises(ValueError, match="empty"):
        Encoder(Int8()).encode(torch.empty(0))
    with pytest.raises(ValueError, match="rank=3 is over that of a matrix of 2 by 8"):
        Encoder(LowRank(3)).encode(made(1, 2, 8))
    for share in (0, 1.1):
        with pytest.raises(ValueError, match=f"share={share}: a share of all elements is over 0, and at most 1"):
            TopK(share)
    with pytest.raises(ValueError, match="rank=0: a rank is positive"):
        LowRank(0)
    with pytest.raises(ValueError, match=r"the codes disagree: rank 0 has a tensor of \[5\], rank 1 of \[6\]"):
        total([Encoder(Int8()).encode(made(1, length)) for length in (5, 6)])


def trained(encode: Callable[[int, int, Tensor], Tensor]) -> float:
    """The loss of a small network, trained by the mean of the gradients of four members."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), nn.Tanh())
    x, teacher = made(1, 512, 16), 0.3 * made(2, 16, 12)
    y = torch.tanh(x @ teacher) + 0.3 * made(3, 512, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(60):
        members = []
        for rank in range(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rank::4]), y[rank::4]).backward()
            grads = [parameter.grad for parameter in model.parameters()]
            members.append([encode(rank, index, grad.clone()) for index, grad in enumerate(grads) if grad is not None])
        for parameter, *grads in zip(model.parameters(), *members, strict=True):
            parameter.grad = torch.stack([grad for grad in grads if grad is not None]).mean(0)
        optimizer.step()
    return nn.functional.mse_loss(model(x), y).item()


@pytest.mark.parametrize("codec", [Int8(), TopK(0.1), Ternary(), LowRank(1)], ids=repr)
def test_training_with_codes_reaches_the_loss_within_5_percent(codec: Codec) -> None:
    encoders: dict[tuple[int, int], Encoder] = {}
    codes: list[Code] = []

    def coded(rank: int, index: int, gradient: Tensor) -> Tensor:
        codes.append(encoders.setdefault((rank, index), Encoder(codec)).encode(gradient))
        return codes[-1].decode()

    plain = trained(lambda rank, index, gradient: gradient)
    # The noise is 0.09, the loss of the model that it began with 0.5.
    assert plain < 0.1
    assert trained(coded) <= 1.05 * plain
    assert len(codes) == 4 * 2 * 60


@pytest.mark.parametrize(("members", "late"), [(3, 1), (4, 1), (4, 2), (3, 0), (3, 2), (6, 2)])
def test_a_gradient_code_gives_the_sum_without_any_members_that_are_late(members: int, late: int) -> None:
    code = GradientCode(members, late)
    gradients = [made(seed, 1000) for seed in range(members)]
    full = reduce(torch.add, gradients)
    sums = []
    for rank in range(members):
        shares = code.parts(rank)
        assert len(shares) == late + 1
        sums.append((rank, reduce(torch.add, [share * gradients[part] for part, share in shares.items()])))
    for there in itertools.permutations(sums, members - late):
        torch.testing.assert_close(code.total(there), full, rtol=0, atol=5e-6)
    torch.testing.assert_close(code.total(sums), full, rtol=0, atol=5e-6)


def test_a_gradient_code_refuses_too_few_members() -> None:
    code = GradientCode(3, 1)
    for ranks in ([0], [1, 1]):
        with pytest.raises(ValueError, match=r"sums of 2 of 3 members are needed, not of \["):
            code.total([(rank, torch.zeros(1)) for rank in ranks])
    with pytest.raises(ValueError, match="late=3: of 3 members, at most 2 may be late"):
        GradientCode(3, 3)
