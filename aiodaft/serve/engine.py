"""Engines, which are actors that continue prompts, and the values between them, the router and clients."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from array import array
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, Final, NamedTuple, Protocol
from uuid import uuid4

from aiodaft.actor import Actor
from aiodaft.exceptions import Overloaded
from aiodaft.member import create_task
from aiodaft.methods import method
from aiodaft.supervision import Backoff, Restart

_PATIENCE: Final = 0.1  # seconds between two looks at a program that starts
PAGE: Final = 16  # tokens whose keys and values lie in one page of memory


def page_keys(tokens: Sequence[int], keys: Sequence[bytes] = ()) -> list[bytes]:
    """A key for each full page, which stands for all tokens up to its end; `keys` are those of the first ones."""
    found = list(keys)
    for start in range(len(found) * PAGE, len(tokens) - PAGE + 1, PAGE):
        page = array("Q", [*tokens[start : start + PAGE]]).tobytes()
        found.append(blake2b((found[-1] if found else b"") + page, digest_size=16).digest())
    return found


class Sampling(NamedTuple):
    """The choice of each token, with the parameters of OpenAI and vLLM.

    It depends on these, on the text before and on the place: not on the batch, the engine, or moves.

    Attributes:
        temperature: 0 for the most likely token.
        top_k: 0 for all.
        logit_bias: Pairs of a token and a number.
        logprobs: The number of most likely tokens whose logprobs each piece has beside its own; None for not even that.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


GREEDY: Final = Sampling()


class Piece(NamedTuple):
    """Tokens that an engine has written: one, or the bytes of one (see `HttpEngine`), which counts as `size`.

    Attributes:
        logprob: If the request asked for it.
        top: The most likely tokens, and their logprobs.
    """

    ids: tuple[int, ...]
    size: int = 1
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt, and the text that is to follow.

    Attributes:
        tokens: The prompt; when another engine goes on, also the text so far, of `written` tokens.
        count: The most tokens that are to follow.
        stops: Tokens that end the text.
        tenant: The client, for fair turns.
        session: For policies.
    """

    tokens: tuple[int, ...]
    count: int
    sampling: Sampling = GREEDY
    stops: frozenset[int] = frozenset()
    written: int = 0
    tenant: str = ""
    session: str = ""
    name: str = field(default_factory=lambda: uuid4().hex)

    @property
    def cost(self) -> int:
        """The tokens to read and to write."""
        return len(self.tokens) + self.count

    @cached_property
    def keys(self) -> list[bytes]:
        """The keys of its full pages."""
        return page_keys(self.tokens)

    def after(self, ids: Iterable[int], count: int) -> Request:
        """The rest, when `count` tokens, `ids`, have been written."""
        more = tuple(ids)
        written = self.written + len(more)
        return replace(self, tokens=self.tokens + more, count=self.count - count, written=written, name=uuid4().hex)


class Refused(ValueError):
    """Raised by an engine that does not take a request as it is: the client gets 400, and this text."""


class Given(NamedTuple):
    """A sequence that goes from engine to engine.

    Attributes:
        tokens: All of it.
        kv: Keys and values from the token `start` on, in the form of the engines; None if they go by layer.
        pieces: Those that the client has not got.
        more: The rest comes later, by `take`.
    """

    tokens: tuple[int, ...]
    kv: Any
    start: int = 0
    pieces: tuple[Piece, ...] = ()
    more: bool = False


class Load(NamedTuple):
    """The load that an engine pushes to routers.

    Attributes:
        places: The requests that it can have at a time.
        work: The tokens that it has to compute.
        forgotten: Keys of pages that it does not have any more.
        process: Its host and process id.
        layers: Those of its model.
        context: The most tokens of a sequence, if there is a limit.
        usage: The part of its memory that is in use.
        asked: Tokens of all prompts so far.
        hits: Those of them that it had in its pages.
        preempted: Sequences that lost their pages so far.
    """

    places: int
    work: int = 0
    forgotten: Sequence[bytes] = ()
    process: object = None
    layers: int = 0
    context: int | None = None
    usage: float = 0.0
    asked: int = 0
    hits: int = 0
    preempted: int = 0


class Engine(Actor, restart=Restart(intensity=10, backoff=Backoff(base=0.01, max=1))):
    """An actor that continues prompts. An engine of yours needs `decode`, and `places`, the requests at a time.

    With `prefill`, it can be in a pool of its own; with `give` and `take`, requests can move. The end of its stream
    cancels a request.
    """

    places: ClassVar[int] = 16

    @method(ordered=False)
    async def decode(
        self, request: Request, given: Given | None = None, layers: list[Any] | None = None
    ) -> AsyncGenerator[Piece]:
        """Give the text that follows, until it has `request.count` tokens, or ends.

        Args:
            request: The prompt.
            given: The result of `prefill` or `give` of another engine. If there is more of it, the first piece has no
                tokens, and as `size` the number of those whose keys and values are here.
            layers: The results of `layer`.
        """
        raise NotImplementedError
        yield  # type: ignore[unreachable]  # makes it a stream

    @method
    async def prefill(self, request: Request, by_layer: bool = False) -> Given:
        """Give the first piece, and the keys and values of the prompt; or have `layer` give these."""
        raise NotImplementedError(f"{type(self).__name__} has no method `prefill`: let it decode")

    @method
    async def layer(self, name: str, number: int) -> Any:
        """Give the keys and values of one layer, as soon as they are there; call `prefill` before."""
        raise NotImplementedError

    @method
    async def give(self, name: str, start: int = 0, last: bool = False) -> Given:
        """Give the keys and values of a sequence that is being decoded, from the token `start` on.

        With `last`, it ends here: the last piece of its stream has no tokens.

        Raises:
            LookupError: It is not here, or has no keys and values.
        """
        raise NotImplementedError

    @method
    async def take(self, name: str, given: Given) -> None:
        """Take the rest of a sequence, for the `decode` that waits for it."""
        raise NotImplementedError

    @method
    async def loads(self) -> AsyncGenerator[Load]:
        """Give the load now, and when it has changed by much. A router adds the requests that it sends."""
        yield Load(self.places)
        await asyncio.get_running_loop().create_future()


class Tokenizer(Protocol):
    """Between text and tokens: there are `size`, of which `stops` end a text."""

    size: int
    stops: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, in which U+FFFD stands for bytes that are no character."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt for the next message of a chat; each has a `role` and a `content`."""
        ...


class Bytes:
    """The tokenizer of models that read bytes, and of engines that take text (`HttpEngine`)."""

    size = 256
    stops: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """The bytes of a text in UTF-8."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes."""
        return bytes(ids).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A line for each message, `role: content`, and the beginning of the next."""
        return self.encode("".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant:")


class HttpEngine(Engine):
    """Starts a server, passes requests on to it, and ends when it ends; its restart policy starts it again.

    Args:
        command: The program and its arguments; `%PORT%` in one is the port to listen on, at 127.0.0.1.
        places: The requests that it gets at a time.
        ids: Whether it gets the tokens of the app's tokenizer, as chat templates need; it has to know
            `return_token_ids`, as vLLM. Default: it gets text, and tokens are bytes.
        fields: More fields of each request, such as `model`.
    """

    def __init__(
        self, command: Sequence[str], places: int = 64, *, ids: bool = False, fields: dict[str, Any] | None = None
    ) -> None:
        self.command, self.places = command, places  # type: ignore[misc]  # of this one
        self.ids, self.fields = ids, fields or {}

    async def __aenter__(self) -> HttpEngine:
        import httpx  # noqa: PLC0415 - optional package

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=httpx.Limits())
        command = [part.replace("%PORT%", str(port)) for part in self.command]
        self.process = await asyncio.create_subprocess_exec(*command)
        create_task(self._end_with_program())
        while True:
            try:
                if (await self.client.get("/health")).status_code == 200:
                    self.context = await self._read_context() if self.ids else None
                    return self
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PATIENCE)

    async def _read_context(self) -> int | None:
        answer = await self.client.get("/v1/models")
        models = answer.json()["data"] if answer.is_success else []
        named = [one for one in models if one["id"] == self.fields.get("model", one["id"])]
        return named[0].get("max_model_len") if named else None

    @method
    async def loads(self) -> AsyncGenerator[Load]:
        """Give the places, and the context, if tokens are those of the server, and it tells it."""
        yield Load(self.places, context=self.context)
        await asyncio.get_running_loop().create_future()

    async def _end_with_program(self) -> None:
        # The last lines of a process are in the ActorDied that its callers get.
        sys.exit(f"{self.command[0]} ended with status {await self.process.wait()}")

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()

    @method(ordered=False)
    async def decode(
        self, request: Request, given: Given | None = None, layers: list[Any] | None = None
    ) -> AsyncGenerator[Piece]:
        """Give the text that follows, as the server writes it. The end of this stream ends the request there."""
        import httpx  # noqa: PLC0415 - optional package

        sampling = request.sampling._asdict()
        sampling["top_k"] = sampling["top_k"] or -1
        sampling["logit_bias"] = dict(request.sampling.logit_bias) or None
        asked = {
            **self.fields,
            **sampling,
            "prompt": list(request.tokens) if self.ids else bytes(request.tokens).decode(errors="replace"),
            "max_tokens": request.count,
            "stop_token_ids": sorted(request.stops),
            "stream": True,
            "return_token_ids": self.ids,
        }
        try:
            async with self.client.stream("POST", "/v1/completions", json=asked) as response:
                if (status := response.status_code) != 200:
                    text = f"the server answered {status}: {(await response.aread()).decode(errors='replace'):.500}"
                    kind = Overloaded if status in (429, 503) else Refused if status < 500 else ValueError
                    raise kind(text)
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise ValueError(f"the server failed: {event['error']}")
                        if event["choices"] and (piece := self._piece(event["choices"][0])):
                            yield piece  # noqa: ASYNC119 - the end of the stream closes it
        except httpx.TransportError as error:
            sys.exit(f"the server does not answer: {error!r}")

    def _piece(self, choice: dict[str, Any]) -> Piece | None:
        ids = choice["token_ids"] if self.ids else choice["text"].encode()
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        return Piece(tuple(ids), len(ids) if self.ids else 1, logprobs[-1] if logprobs else None) if ids else None
