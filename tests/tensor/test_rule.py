"""Rules of users for operations of theirs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lockstep import run_whole  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402

from aiodaft.tensor.capturing import capture  # noqa: E402
from aiodaft.tensor.planner import Planner  # noqa: E402
from aiodaft.tensor.rules import Rules, rule  # noqa: E402
from aiodaft.tensor.strategy import Strategy  # noqa: E402

# An operation that torch has no rule for: rows times a weight.
LIBRARY = torch.library.Library("of_a_user", "FRAGMENT")
LIBRARY.define("scale(Tensor x, Tensor weight, float by) -> Tensor")
LIBRARY.impl("scale", lambda x, weight, by: x * weight * by, "CompositeExplicitAutograd")


def test_an_operation_of_a_user_is_done_whole_until_it_has_a_rule() -> None:
    scale = torch.ops.of_a_user.scale.default

    def step(x: Any, weight: Any) -> Any:
        return scale(x, weight, 2.0)

    x, weight = torch.arange(10.0).view(5, 2), torch.tensor([1.0, 3.0])
    program = capture(step, x, weight)

    def kinds() -> list[str]:
        made = Planner(program, Strategy(inputs={"x": {"dp": Shard(0)}}), Rules({"dp": 3})).made()
        (given,) = run_whole(made, {"x": x, "weight": weight}).values()
        assert torch.equal(given, x * weight * 2)
        return [one.kind for one in made.instructions]

    assert kinds() == ["all_gather", "op"]

    @rule(scale)
    def rows(x: Any, weight: Any, by: float) -> Any:
        return [([Shard(dim)], [Shard(dim), Replicate(), None]) for dim in range(x.ndim - 1)]

    # The result is gathered.
    assert kinds() == ["op", "all_gather"]
