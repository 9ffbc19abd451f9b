"""How long a runtime waits, for tests that change it while the runtime is open."""

from __future__ import annotations

import aiodaft
from aiodaft._runtime.platform.env import Timeouts


def timeouts_of(rt: aiodaft.Runtime) -> Timeouts:
    """The timeouts of a runtime's controller."""
    return rt._controller.options.env.timeouts
