"""A model of an app, in a module of its own: its actors do not load the web framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiodaft import Actor, method


class LLM(Actor, gpus=1):
    """Answers, endlessly if asked to, and tells how its calls ended."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @method
    async def generate(self, prompt: str) -> str:
        self.events.append(f"{prompt} began")
        try:
            if prompt == "forever":
                await asyncio.Event().wait()
            if prompt == "too long":
                raise ValueError(f"{prompt!r} is too long")
            return prompt.upper()
        finally:
            self.events.append(f"{prompt} ended")

    @method
    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        self.events.append(f"{prompt} began")
        try:
            for word in prompt.split():
                yield word
            while prompt == "forever":
                await asyncio.sleep(0)
                yield "and on" * 1000
        finally:
            self.events.append(f"{prompt} ended")

    @method
    async def history(self) -> list[str]:
        return self.events
