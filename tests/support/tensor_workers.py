"""Workers that have methods of a user."""

from __future__ import annotations

import os
import sys

from aiodaft import method
from aiodaft.tensor.worker import Worker


class Extended(Worker):
    """A worker with methods of a user."""

    @method
    def pid(self) -> int:
        return os.getpid()

    @method
    def shape(self, step: str, name: str) -> tuple[int, ...]:
        """The shape of the local part of a parameter."""
        return tuple(self.state(step)[name].shape)

    @method
    def modules(self) -> list[str]:
        """The modules of torch that planning alone needs, and that are here."""
        return [name for name in sys.modules if name.startswith(("torch.distributed.tensor", "aiodaft.tensor.plan"))]
