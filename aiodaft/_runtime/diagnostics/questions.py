"""Questions to processes that may not answer: whoever asks has better to do than to wait for the answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiodaft._runtime.objects.ref_state import state_of
from aiodaft.ref import Ref


async def is_answered(question: Ref[Any], patience: float) -> bool:
    """Wait for an answer; True once it, or an error, is there. If it takes longer, the question is withdrawn.

    Cancellation: the question is withdrawn. However it ends is then no news to anybody.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                # Unlike awaiting the ref itself, this does not wait for the cleanup of what cannot run.
                await question.ready()
        return question.done()
    finally:
        state_of(question).mark_seen()
        question.cancel()
