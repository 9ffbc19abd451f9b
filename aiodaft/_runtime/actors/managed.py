"""Instances of actors that are context managers."""

from __future__ import annotations

from typing import Any

from aiodaft._runtime.platform.threads import HelperThread


async def enter(instance: Any, thread: HelperThread) -> tuple[Any, Any]:
    """Enter an instance if it is a context manager; `__aenter__` takes precedence over `__enter__`.

    Returns:
        The instance that serves the calls, and the manager to `leave`, or None.
    """
    if hasattr(type(instance), "__aenter__"):
        entered = await instance.__aenter__()
    elif hasattr(type(instance), "__enter__"):
        entered = await thread.run(instance.__enter__)
    else:
        return instance, None
    return (entered if isinstance(entered, type(instance)) else instance), instance


async def leave(manager: Any, thread: HelperThread) -> None:
    if hasattr(type(manager), "__aenter__"):
        await manager.__aexit__(None, None, None)
    elif manager is not None:
        await thread.run(lambda: manager.__exit__(None, None, None))
