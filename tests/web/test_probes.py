"""The answers of an ingress's probes about actors."""

from __future__ import annotations

import pytest
from asgi_server import FakeServer
from supervised import AT_ONCE, Mortal

import aiodaft
from aiodaft.web.admission import Counts
from aiodaft.web.ingress import Probes, RunningProbes

pytestmark = pytest.mark.asyncio(loop_scope="module", loop_factories=["uvloop"])


async def readiness(rt: aiodaft.Runtime) -> tuple[int, str]:
    """The status and the text of /readyz."""
    server = FakeServer()
    async with RunningProbes(Probes(), rt, Counts()) as answers:
        await answers["/readyz"]({}, server.send)
    begin, body = server.sent
    return begin["status"], body["body"].decode()


async def unready(rt: aiodaft.Runtime) -> str:
    """The text of /readyz, as soon as it is 503."""
    while (found := await readiness(rt))[0] == 200:
        pass
    assert found[0] == 503
    return found[1]


async def die(actor: Mortal) -> None:
    with pytest.raises(aiodaft.ActorDied):
        await actor.die()


async def test_an_app_of_which_an_actor_was_given_up_is_not_ready(log_only: aiodaft.Runtime) -> None:
    model = await log_only.on(restart=aiodaft.Restart(intensity=0)).spawn(Mortal)
    name = (await log_only.info(model)).name
    assert await readiness(log_only) == (200, "ready\n")
    await die(model)
    assert await unready(log_only) == f"{name} is dead\n"
    await log_only.stop(model)
    assert await readiness(log_only) == (200, "ready\n")


async def test_an_app_of_which_a_group_is_short_is_not_ready_until_it_is_healed(log_only: aiodaft.Runtime) -> None:
    group = await log_only.on(restart="temporary").group(2, Mortal)
    name = (await log_only.info(group[1])).name
    await die(group[1])
    assert await unready(log_only) == f"{name} is dead\n"
    await group.heal()
    assert await readiness(log_only) == (200, "ready\n")


async def test_an_actor_that_is_never_given_up_is_ready_again(log_only: aiodaft.Runtime) -> None:
    model = await log_only.on(restart=aiodaft.Restart(intensity=None, backoff=AT_ONCE)).spawn(Mortal)
    for epoch in range(1, 5):
        await die(model)
        assert await model.get() == 0
        assert (await log_only.info(model)).epoch == epoch
    assert await readiness(log_only) == (200, "ready\n")
