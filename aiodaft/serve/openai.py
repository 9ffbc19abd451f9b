"""OpenAI's API in front of a router, as an ASGI app."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aiodaft.exceptions import DeadlineExceeded, OutcomeUnknown, Overloaded
from aiodaft.runtime import Runtime
from aiodaft.serve.engine import Bytes, Piece, Refused, Request, Sampling, Tokenizer
from aiodaft.serve.routing import EnginesGone, Router
from aiodaft.web import Ingress

# Fields that change the answer in a way that is not there, and the values that do not.
_MISSING: Final[Mapping[str, Any]] = {
    "audio": None,
    "best_of": 1,
    "functions": [],
    "prompt_logprobs": None,
    "response_format": {"type": "text"},
    "suffix": "",
    "tools": [],
}
_NUMBERS: Final = (
    ("temperature", 1.0, 0, 2),
    ("top_p", 1.0, 0, 1),
    ("min_p", 0.0, 0, 1),
    ("presence_penalty", 0.0, -2, 2),
    ("frequency_penalty", 0.0, -2, 2),
    ("repetition_penalty", 1.0, 0.01, 100),
)
_MOST: Final = 128  # texts of one request, and stop strings


class BadRequest(Exception):
    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Asked:
    """A request for texts: one of `requests` for each, and in `prompts` its beginning, if that is to be repeated."""

    chat: bool
    model: str
    requests: list[Request]
    prompts: list[str]
    several: int
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    ids: bool
    timeout: float | None


class _Body:
    def __init__(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise BadRequest(f"a JSON object is needed, not {type(fields).__name__}")
        self.fields = {name: value for name, value in fields.items() if value is not None}

    def one(self, name: str, kind: type, default: Any) -> Any:
        value = self.fields.get(name, default)
        if not isinstance(value, kind):
            raise BadRequest(f"'{name}' is to be of type {kind.__name__}, not {value!r:.100}", name)
        return value

    def number(self, name: str, default: Any, low: float, high: float, kind: Any = (int, float)) -> Any:
        value = self.fields.get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            whole = "a whole number" if kind is int else "a number"
            raise BadRequest(f"'{name}' is to be {whole} from {low:g} to {high:g}, not {value!r:.100}", name)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or len(found) > _MOST or not all(isinstance(one, str) and one for one in found):
            raise BadRequest(f"'{name}' is to be a string or a list of strings, not {value!r:.100}", name)
        return tuple(found)

    def ids(self, name: str, value: Any, size: int) -> list[int]:
        if not (isinstance(value, list) and all(type(one) is int and 0 <= one < size for one in value)):
            raise BadRequest(f"'{name}' is to be tokens, which are less than {size}, not {value!r:.100}", name)
        return value


def asked_of(fields: Any, chat: bool, tokenizer: Tokenizer, context: int | None) -> Asked:
    """The request with these fields; others do nothing."""
    body = _Body(fields)
    for name, neutral in _MISSING.items():
        if body.fields.get(name, neutral) != neutral:
            raise BadRequest(f"'{name}' is not supported", name, "unsupported_parameter")
    prompts = [_chat(body, tokenizer)] if chat else _prompts(body, tokenizer)
    count = body.number("max_tokens", None, 1, 1 << 31, int)
    count = body.number("max_completion_tokens", count, 1, 1 << 31, int)
    stops = frozenset(body.ids("stop_token_ids", body.fields.get("stop_token_ids", []), tokenizer.size))
    if not body.one("ignore_eos", bool, False):
        stops |= tokenizer.stops
    sampling, n = _sampling(body, chat, tokenizer.size), body.number("n", 1, 1, _MOST, int)
    if n * len(prompts) > _MOST:
        raise BadRequest(f"{n * len(prompts)} texts are asked for: {_MOST} are the most", "n")
    tenant, session = body.one("user", str, ""), body.one("prompt_cache_key", str, "")
    requests = [
        Request(
            tuple(prompt),
            _fitting(len(prompt), count, context, chat),
            sampling._replace(seed=sampling.seed + number),
            stops,
            tenant=tenant,
            session=session,
        )
        for prompt in prompts
        for number in range(n)
    ]
    echo = not chat and body.one("echo", bool, False)
    if echo and sampling.logprobs is not None:
        raise BadRequest("'echo' with 'logprobs' is not supported", "echo", "unsupported_parameter")
    return Asked(
        chat,
        body.one("model", str, ""),
        requests,
        [tokenizer.decode(request.tokens) if echo else "" for request in requests],
        len(prompts),
        body.strings("stop"),
        body.one("stream", bool, False),
        bool(body.one("stream_options", dict, {}).get("include_usage")),
        body.one("return_token_ids", bool, False),
        body.number("timeout", None, 0.001, 1 << 31),
    )


def _prompts(body: _Body, tokenizer: Tokenizer) -> list[list[int]]:
    given = body.fields.get("prompt", "")
    several = given if isinstance(given, list) and not (given and type(given[0]) is int) else [given]
    try:
        found = [
            tokenizer.encode(one) if isinstance(one, str) else body.ids("prompt", one, tokenizer.size)
            for one in several
        ]
    except (TypeError, UnicodeEncodeError) as error:  # half of a pair of surrogates
        raise BadRequest(f"'prompt' is not text: {error}", "prompt") from None
    if not found or not all(found):
        raise BadRequest("'prompt' is empty", "prompt")
    return found


def _chat(body: _Body, tokenizer: Tokenizer) -> list[int]:
    messages = body.one("messages", list, [])
    if not messages:
        raise BadRequest("'messages' is empty", "messages")
    try:
        return tokenizer.chat([_message(one) for one in messages])
    except BadRequest:
        raise
    except Exception as error:
        raise BadRequest(f"the chat template does not take these messages: {error}", "messages") from error


def _message(one: Any) -> dict[str, Any]:
    if not isinstance(one, dict) or not isinstance(one.get("role"), str):
        raise BadRequest(f"a message is to have a 'role' and a 'content', not {one!r:.100}", "messages")
    content = one.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise BadRequest("the content of a message is to be text, or parts of the type 'text'", "messages")
    return {**one, "content": "".join(part["text"] for part in parts)}


def _sampling(body: _Body, chat: bool, size: int) -> Sampling:
    logprobs = body.number("top_logprobs" if chat else "logprobs", None, 0, 20, int)
    if chat:
        logprobs = (logprobs or 0) if body.one("logprobs", bool, False) else None
    biases = body.one("logit_bias", dict, {})
    try:
        logit_bias = tuple((int(token), float(bias)) for token, bias in biases.items())
    except (TypeError, ValueError, OverflowError):
        logit_bias = ((-1, 0.0),)
    if not all(0 <= token < size and -100 <= bias <= 100 for token, bias in logit_bias):
        text = f"'logit_bias' is to map tokens, which are less than {size}, to numbers from -100 to 100"
        raise BadRequest(text, "logit_bias")
    numbers = {name: body.number(name, default, low, high) for name, default, low, high in _NUMBERS}
    top_k, seed = body.number("top_k", 0, -1, 1 << 31, int), random.getrandbits(62)
    seed = body.number("seed", seed, -(1 << 63), (1 << 63) - 1, int)
    return Sampling(top_k=max(0, top_k), seed=seed, logit_bias=logit_bias, logprobs=logprobs, **numbers)


def _fitting(prompt: int, count: int | None, context: int | None, chat: bool) -> int:
    if count is None and not chat:
        count = 16
    if context is None:
        return count or 1 << 31
    if prompt + (count or 1) > context:
        kind = "messages" if chat else "prompt"
        text = f"This model's maximum context length is {context} tokens: {prompt} are in the {kind}"
        raise BadRequest(f"{text}, {count or 1} in the completion.", kind, "context_length_exceeded")
    return context - prompt if count is None else count


class Text:
    """The text of tokens as they come; holds back the beginnings of characters and of stop strings."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._begin = self._read = 0
        self._held = ""

    def add(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text that is new, and whether a stop string follows."""
        self._ids.extend(ids)
        self._decode(is_last=False)
        if (end := min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)) >= 0:
            return self._held[:end], True
        keep = next(
            (
                size
                for size in range(min(len(self._held), max(map(len, self._stops), default=0)), 0, -1)
                if any(stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def end(self) -> str:
        self._decode(is_last=True)
        return self._held

    def _decode(self, *, is_last: bool) -> None:
        # A token may look different behind others: those of the last part are decoded again before it.
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        now = self._tokenizer.decode(self._ids[self._begin :])
        if is_last or not now.endswith("\ufffd"):
            self._held += now[len(before) :]
            self._begin, self._read = self._read, len(self._ids)


_logger = logging.getLogger("aiodaft.serve")
_BOUNDS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
_Tell = Callable[["_Choice", str, list[Piece], str | None], object]
_Send = Callable[[Any], Awaitable[None]]


def app(
    router: Callable[[Runtime], AbstractAsyncContextManager[Router]],
    model: str = "model",
    tokenizer: Tokenizer | None = None,
    *,
    timeout: float | None = None,
    runtime: Callable[[], Runtime] | None = None,
) -> Ingress:
    """An ASGI app with OpenAI's API in front of a router. A client that leaves frees its places.

    Args:
        router: Opens the router, and its engines, in a runtime.
        model: The name of the model.
        tokenizer: That of the model. Default: tokens are bytes.
        timeout: Seconds for a request that names none. Default: no limit.
        runtime: Makes the runtime. Default: that of `web.Ingress`.
    """

    @asynccontextmanager
    async def actors(rt: Runtime) -> AsyncGenerator[dict[str, Router]]:
        async with router(rt) as opened:
            yield {"router": opened}

    api = _Api(model, tokenizer or Bytes(), timeout)
    routes = [
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.models),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    handlers: dict[Any, Any] = {HTTPException: _answer_http_error, BadRequest: _answer_bad_request}
    made = Starlette(routes=routes, exception_handlers=handlers)
    return Ingress(made, actors) if runtime is None else Ingress(made, actors, runtime=runtime)


def _failed(status: int, error: Mapping[str, object], headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": error}, status, headers)


def _error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    return {"message": message, "type": kind, "param": param, "code": code}


def _answer_http_error(_: HttpRequest, error: Any) -> Response:
    return _failed(error.status_code, _error(error.detail, "invalid_request_error"), error.headers)


def _answer_bad_request(_: HttpRequest, error: Any) -> Response:
    return _failed(error.status, _error(str(error), "invalid_request_error", error.param, error.code))


class _Metrics:
    """Metrics of requests, with the names of vLLM."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()

        def made(cls: Any, name: str, *labels: str, **options: Any) -> Any:
            named = cls(f"vllm:{name}", "", ("model_name", *labels), registry=self.registry, **options)
            return partial(named.labels, model) if labels else named.labels(model)

        self.running = made(Gauge, "num_requests_running")
        self.waiting = made(Gauge, "num_requests_waiting")
        self.usage = made(Gauge, "kv_cache_usage_perc")
        self.queries = made(Gauge, "prefix_cache_queries_total")
        self.hits = made(Gauge, "prefix_cache_hits_total")
        self.preempted = made(Gauge, "num_preemptions_total")
        self.prompt = made(Count, "prompt_tokens")
        self.text = made(Count, "generation_tokens")
        self.ended = made(Count, "request_success", "finished_reason")
        self.first = made(Histogram, "time_to_first_token_seconds", buckets=_BOUNDS)
        self.between = made(Histogram, "inter_token_latency_seconds", buckets=_BOUNDS)
        self.whole = made(Histogram, "e2e_request_latency_seconds", buckets=_BOUNDS)

    def page(self, router: Router) -> Response:
        loads = [member.load for member in router.members if member.load]
        self.running.set(router.under_way)
        self.waiting.set(len(router.turns.waiting))
        self.usage.set(max((load.usage for load in loads), default=0))
        self.queries.set(sum(load.asked for load in loads))
        self.hits.set(sum(load.hits for load in loads))
        self.preempted.set(sum(load.preempted for load in loads))
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class _Api:
    def __init__(self, model: str, tokenizer: Tokenizer, timeout: float | None) -> None:
        self.model, self.tokenizer, self.timeout = model, tokenizer, timeout
        self.counts, self.began = _Metrics(model), int(time.time())

    async def complete(self, request: HttpRequest) -> _Answer:
        return await self.answer(request, chat=False)

    async def chat(self, request: HttpRequest) -> _Answer:
        return await self.answer(request, chat=True)

    async def answer(self, request: HttpRequest, *, chat: bool) -> _Answer:
        try:
            body = json.loads(await request.body())
        except (RecursionError, ValueError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        router: Router = request.state.router
        asked = asked_of(body, chat, self.tokenizer, router.context)
        if asked.model not in ("", self.model):
            raise BadRequest(f"The model `{asked.model}` does not exist.", "model", "model_not_found", 404)
        return _Answer(self, router, asked)

    async def models(self, request: HttpRequest) -> Response:
        router: Router = request.state.router
        about = {"id": self.model, "object": "model", "created": self.began, "owned_by": "aiodaft"}
        about |= {"max_model_len": router.context}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [about]})
        if name != self.model:
            raise BadRequest(f"The model `{name}` does not exist.", "model", "model_not_found", 404)
        return JSONResponse(about)

    async def health(self, request: HttpRequest) -> Response:
        router: Router = request.state.router
        is_up = any(member.load and member.role == "decode" for member in router.members)
        return Response(status_code=200 if is_up else 503)

    async def metrics(self, request: HttpRequest) -> Response:
        router: Router = request.state.router
        return self.counts.page(router)


class _Choice:
    """One text of an answer."""

    def __init__(self, number: int, request: Request, prompt: str, asked: Asked, tokenizer: Tokenizer) -> None:
        self.number, self.request, self.prompt, self.asked = number, request, prompt, asked
        self.tokenizer, self.text = tokenizer, Text(tokenizer, asked.stops)
        self.written = self.offset = 0
        # Of an answer in one part.
        self.parts, self.pieces, self.reason = list[str](), list[Piece](), ""

    async def run(self, router: Router, metrics: _Metrics, tell: _Tell) -> None:
        began = before = time.monotonic()
        reason, last = "", -1
        async with aclosing(router.generate(self.request)) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                (metrics.between if self.written else metrics.first).observe(now - before)
                before, last = now, piece.ids[-1]
                if not self.written:
                    metrics.prompt.inc(len(self.request.tokens))
                metrics.text.inc(piece.size)
                self.written += piece.size
                part, is_over = self.text.add(piece.ids)
                reason = "stop" if is_over else ""
                tell(self, part, [piece], reason or None)
                if is_over:
                    break
        if not reason:
            is_full = self.written >= self.request.count and last not in self.request.stops
            reason = "length" if is_full else "stop"
            tell(self, self.text.end(), [], reason)
        metrics.ended(reason).inc()
        metrics.whole.observe(time.monotonic() - began)

    def named(self, ids: Sequence[int], logprob: float | None) -> dict[str, Any]:
        name = self.tokenizer.decode(ids)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    def logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        content = [
            self.named(piece.ids, piece.logprob)
            | {"top_logprobs": [self.named((token,), logprob) for token, logprob in piece.top]}
            for piece in pieces
        ]
        if self.asked.chat:
            return {"content": content}
        tokens = [one["token"] for one in content]
        *offsets, self.offset = accumulate(map(len, tokens), initial=self.offset)
        top = [{each["token"]: each["logprob"] for each in (*one["top_logprobs"], one)} for one in content]
        logprobs = [one["logprob"] for one in content]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def part(self, name: str, text: str, pieces: list[Piece], reason: str | None) -> dict[str, Any]:
        content = {name: {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        about: dict[str, Any] = {"index": self.number, "logprobs": self.logprobs(pieces), "finish_reason": reason}
        if self.asked.ids:
            about["token_ids"] = [token for piece in pieces for token in piece.ids]
        return about | content


class _Answer:
    """The response to a request, plain or as server-sent events."""

    def __init__(self, api: _Api, router: Router, asked: Asked) -> None:
        self.api, self.router, self.asked = api, router, asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self.about = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": api.model,
        }
        each = enumerate(zip(asked.requests, asked.prompts, strict=True))
        self.choices = [_Choice(number, *one, asked, api.tokenizer) for number, one in each]
        self.parts = asyncio.Queue[tuple[_Choice, str, list[Piece], str | None] | None]()
        self.has_begun = False

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        """Answer, as ASGI says."""
        seconds = self.asked.timeout or self.api.timeout
        failed, headers = 500, dict[str, str]()
        try:
            async with asyncio.timeout(seconds):
                await self.write(scope, receive, send)
            return
        except* (Overloaded, OutcomeUnknown, EnginesGone) as errors:
            headers = {"Retry-After": "1"}
            failed, error = 503, _error("The server is overloaded: try again.", "server_error", None, "overloaded")
            _logger.debug("answered by 503: %s", errors)
        except* (TimeoutError, DeadlineExceeded):
            text = f"The request was not complete after {seconds} s." if seconds else "The request took too long."
            failed, error = 504, _error(text, "server_error", None, "timeout")
        except* Refused as errors:
            failed, error = 400, _error(str(errors.exceptions[0]), "invalid_request_error")
        except* Exception as errors:
            _logger.exception("a request failed", exc_info=errors)
            error = _error("The server had an error.", "server_error")
        if self.has_begun:
            await send({"type": "http.response.body", "body": _event({"error": error})})
        else:
            await _failed(failed, error, headers)(scope, receive, send)

    async def write(self, scope: Any, receive: Any, send: _Send) -> None:
        async with asyncio.TaskGroup() as tasks:
            for choice in self.choices:
                one = tasks.create_task(choice.run(self.router, self.api.counts, self.put))
                one.add_done_callback(lambda _: self.parts.put_nowait(None))
            left = len(self.choices)
            while left:
                if (part := await self.parts.get()) is None:
                    left -= 1
                elif self.asked.stream:
                    await self.tell(send, *part)
                else:
                    choice, text, pieces, reason = part
                    choice.parts.append(text)
                    choice.pieces += pieces
                    choice.reason = reason or choice.reason
        read = sum(len(choice.request.tokens) for choice in self.choices[:: len(self.choices) // self.asked.several])
        written = sum(choice.written for choice in self.choices)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        if self.asked.stream:
            last = [_event({**self.about, "choices": [], "usage": usage})] if self.asked.usage else []
            await send({"type": "http.response.body", "body": b"".join([*last, b"data: [DONE]\n\n"])})
            return
        choices = [
            choice.part("message", choice.prompt + "".join(choice.parts), choice.pieces, choice.reason)
            for choice in self.choices
        ]
        await JSONResponse({**self.about, "choices": choices, "usage": usage})(scope, receive, send)

    def put(self, *part: Any) -> None:
        self.parts.put_nowait(part)

    async def tell(self, send: _Send, choice: _Choice, text: str, pieces: list[Piece], reason: str | None) -> None:
        events = []
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if self.asked.chat or any(self.asked.prompts):
                events = [self.event(each.part("delta", each.prompt, [], None)) for each in self.choices]
        part = choice.part("delta", text, pieces, reason)
        if self.asked.chat:
            del part["delta"]["role"]  # it is in the first one
        body = b"".join([*events, self.event(part)])
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def event(self, choice: dict[str, Any]) -> bytes:
        return _event({**self.about, "choices": [choice], **({"usage": None} if self.asked.usage else {})})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
