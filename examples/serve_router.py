"""The router of `serve_disagg.py`: sends prompts to engines that prefill and engines that decode, and follows them."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager

from serve_engine import Engine
from serve_policies import Member, Policy, Prompt, Turns, prefix_locality, two_choices

from aiodaft.exceptions import OutcomeUnknown

LOSSES = 3  # of engines, for one prompt


class Router:
    """Engines with roles. An engine may get the other role at any time, and completes its sequences.

    Args:
        prefill: Engines that prefill. Without one, those that decode do it themselves.
        decode: Engines that decode.
        policies: For each role, the choice of one of its engines.
        turns: The order of the prompts.
        by_layer: Whether keys and values move layer by layer, or all at once.
    """

    def __init__(
        self,
        prefill: Iterable[Engine],
        decode: Iterable[Engine],
        policies: Mapping[str, Policy] | None = None,
        turns: Turns | None = None,
        by_layer: bool = False,
    ) -> None:
        self.members = [Member(engine, "prefill") for engine in prefill]
        self.members += [Member(engine, "decode") for engine in decode]
        self.policies = {"prefill": prefix_locality, "decode": two_choices, **(policies or {})}
        self.turns, self.by_layer = turns or Turns(), by_layer
        self.under_way = self.sent = self.resumed = 0
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Router"]:
        async with asyncio.TaskGroup() as tasks:
            followers = [tasks.create_task(self.follow(member)) for member in self.members]
            try:
                while not all(member.load for member in self.members):
                    await self.changed.wait()
                yield self
            finally:
                for follower in followers:
                    follower.cancel()

    async def follow(self, member: Member) -> None:
        """Keep the loads that an engine pushes. After a death, its next incarnation begins with one."""
        while member.role != "gone":
            try:
                async for load in member.engine.loads():
                    member.take(load)
                    self.ring()
            except OutcomeUnknown as error:
                member.lose()
                if error.executed is False:  # it is not restarted any more
                    member.role = "gone"
                self.ring()

    def ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def assign(self, number: int, role: str) -> None:
        """Give an engine a role."""
        if role != "decode" and self.up("decode") in ([], [self.members[number]]):
            raise ValueError("this is the last engine that decodes")
        self.members[number].role = role
        self.ring()

    async def complete(self, prompt: Prompt) -> AsyncGenerator[int]:
        """Give the tokens that follow. When an engine dies, others go on from the tokens that there are."""
        async with self.turn(prompt):
            tokens, losses = prompt.tokens, 0
            while len(tokens) < len(prompt.tokens) + prompt.count:
                left = len(prompt.tokens) + prompt.count - len(tokens)
                try:
                    async with aclosing(self.attempt(Prompt(tokens, left, prompt.tenant))) as attempt:
                        async for token in attempt:
                            tokens += bytes([token])
                            yield token  # noqa: ASYNC119 - `Events` closes it
                except OutcomeUnknown:
                    losses += 1
                    if losses > LOSSES:
                        raise
                    self.resumed += 1
                    await asyncio.sleep(0.05 * losses)  # its loads end at about the same time

    @asynccontextmanager
    async def turn(self, prompt: Prompt) -> AsyncGenerator[None]:
        """Wait until the prompt is next, and an engine has a place."""
        self.turns.enter(prompt)
        try:
            while not (self.has_place() and self.turns.next() is prompt):
                await self.changed.wait()
            self.turns.pay(prompt)
        finally:
            self.turns.leave(prompt)
            self.ring()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self.ring()

    def has_place(self) -> bool:
        return self.under_way < sum(member.load.places for member in self.up("decode") if member.load)

    def up(self, role: str) -> list[Member]:
        """The engines with a role that run, as far as is known."""
        members = [member for member in self.members if member.role == role]
        if role == "decode" and not members:
            raise RuntimeError("all engines that decode are gone for good")
        return [member for member in members if member.load]

    async def attempt(self, prompt: Prompt) -> AsyncGenerator[int]:
        """Give the tokens that follow, as far as the chosen engines live."""
        prefillers = self.up("prefill")
        prefiller = await self.policies["prefill"](prompt, prefillers) if prefillers else None
        while not (decoders := self.up("decode")):
            await self.changed.wait()
        beside = [member for member in decoders if prefiller and member.process == prefiller.process]
        decoder = await self.policies["decode"](prompt, beside or decoders)
        work = prompt.count if prefiller else prompt.cost
        self.sent += 1
        with decoder.sending(prompt.tokens, work, self.sent), ExitStack() as prefilling:
            prefilled, layers = None, None
            if prefiller is not None:
                prefilling.enter_context(prefiller.sending(prompt.tokens, len(prompt.tokens), self.sent))
                name = uuid.uuid4().hex if self.by_layer else None
                prefilled = prefiller.engine.prefill(prompt.tokens, name)
                numbers = range(prefiller.load.layers) if self.by_layer else ()
                layers = [prefiller.engine.layer(name, number) for number in numbers]
                for ref in (prefilled, *layers):
                    prefilling.callback(ref.cancel)
            # Keys and values go from engine to engine.
            async for token in decoder.engine.decode(prompt.tokens, prompt.cost, prefilled, layers):
                prefilling.close()
                yield token  # noqa: ASYNC119 - `complete` closes it
