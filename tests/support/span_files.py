"""Spans of OpenTelemetry's SDK, of each process in a file of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

FOLDER = "AIODAFT_TEST_SPANS"


class FileExporter(SpanExporter):
    """Adds spans to the file of this process, in the folder that is set now."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        folder = os.environ.get(FOLDER)
        if folder is not None:
            with (Path(folder) / str(os.getpid())).open("a") as file:
                file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        return SpanExportResult.SUCCESS


def set_up(processor: SpanProcessor | None = None) -> None:
    provider = TracerProvider()
    provider.add_span_processor(processor or SimpleSpanProcessor(FileExporter()))
    trace.set_tracer_provider(provider)


def set_up_slow() -> None:
    """As programs do, which do not send each span at once."""
    set_up(BatchSpanProcessor(FileExporter(), schedule_delay_millis=600_000))


def fail() -> None:
    raise OSError("no collector answers")


class FoundSpan(NamedTuple):
    name: str
    kind: str
    trace: str
    id: str
    parent: str | None
    attributes: dict[str, Any]
    status: str
    pid: int


class SpanFolder:
    """The spans of all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def spans(self) -> list[FoundSpan]:
        return [
            _read(json.loads(line), int(path.name))
            for path in sorted(self._folder.iterdir())
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    async def span(self, name: str, kind: str, is_it: Callable[[FoundSpan], bool] = lambda span: True) -> FoundSpan:
        """The only span like this, as soon as it has ended."""
        while not (found := [span for span in self.spans() if (span.name, span.kind) == (name, kind) and is_it(span)]):
            await asyncio.sleep(0.01)
        (one,) = found
        return one

    async def child(self, parent: FoundSpan, name: str, kind: str) -> FoundSpan:
        """The only span like this below another one."""
        found = await self.span(name, kind, lambda span: span.parent == parent.id)
        assert found.trace == parent.trace
        return found


def _read(span: dict[str, Any], pid: int) -> FoundSpan:
    def plain(text: str | None) -> str:
        return (text or "").removeprefix("0x")

    context, status = span["context"], span["status"]["status_code"]
    kind, parent = span["kind"].removeprefix("SpanKind."), plain(span["parent_id"]) or None
    found = plain(context["trace_id"]), plain(context["span_id"])
    return FoundSpan(span["name"], kind, *found, parent, span["attributes"], status, pid)
