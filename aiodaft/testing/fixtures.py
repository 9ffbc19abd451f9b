"""The runtimes of the pytest plugin, which loads this with the first test that uses one; see `aiodaft_pytest`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest

from aiodaft.runtime import Runtime
from aiodaft.testing.in_process import in_process
from aiodaft.testing.leaks import Before, held_refs
from aiodaft.testing.local_cluster import LocalCluster, local_cluster

FAILED: Final = pytest.StashKey[bool]()
CLUSTER: Final = pytest.StashKey[LocalCluster]()


@asynccontextmanager
async def opened(kind: str, item: pytest.Item) -> AsyncGenerator[Runtime]:
    """The runtime of a fixture; its end fails a test that has passed and has left something."""
    options = _options(item)
    nodes, leaks = options.pop("nodes", None), options.pop("leaks", True)
    before = Before()
    refs: list[str] = []
    async with AsyncExitStack() as stack:
        if kind == "daft":
            if nodes is not None:
                raise pytest.UsageError(f"{item.nodeid}: only `daft_cluster` has nodes, `daft` has no processes")
            runtime = in_process(**options)
        elif nodes is None:
            runtime = Runtime(**{"cpus": 64, "gpus": 0, "preload": (), **options})
        else:
            runtime = await _attached(stack, nodes, options, item)
        async with runtime:
            yield runtime  # noqa: RUF075 - pytest raises no error here
            if leaks and not item.stash.get(FAILED, False):
                refs = held_refs(runtime, getattr(item, "funcargs", {}).values())
    if leaks and not item.stash.get(FAILED, False) and (left := refs + before.left()):
        pytest.fail(f"{item.nodeid} leaks:\n" + "\n".join(f"- {line}" for line in left), pytrace=False)


async def _attached(stack: AsyncExitStack, nodes: int, options: dict[str, Any], item: pytest.Item) -> Runtime:
    offers = [f"--cpus={options.pop('cpus', 64)}", f"--gpus={options.pop('gpus', 0)}"]
    cluster = await stack.enter_async_context(local_cluster(nodes, offers))
    item.stash[CLUSTER] = cluster
    return Runtime(**{**options, "address": cluster.address, "key_file": cluster.key_file})


def _options(item: pytest.Item) -> dict[str, Any]:
    """The options of `pytest.mark.daft`, the closest one last."""
    found: dict[str, Any] = {}
    for marker in item.iter_markers("daft"):
        if marker.args:
            raise pytest.UsageError(f"{item.nodeid}: pytest.mark.daft takes options by name, such as gpus=2")
        found = {**marker.kwargs, **found}
    return found


def pids_of_nodes(item: pytest.Item) -> Mapping[str, int]:
    cluster = item.stash.get(CLUSTER, None)
    return {} if cluster is None else cluster.pids
