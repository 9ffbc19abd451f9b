"""The same measurements in several frameworks, each in an interpreter of its own, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Final

from . import web

OURS: Final = "aiodaft"
PEERS: Final = ("ray", "dask", "xoscar", "monarch")
_HELLO: Final = "hello, cold: import, start, call, stop (s)"
# Lines with this unit are better if they are higher.
_RATE: Final = "(1/s)"
_MODULES: Final = {"dask": "distributed"}
# The packages that frameworks need to serve requests.
_WEB: Final = {OURS: "fastapi", "ray": "ray.serve"}

# Of each line, the samples of each framework.
Samples = dict[str, dict[str, list[float]]]


class Peer:
    """A framework that measures in a process of its own."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, answers: asyncio.StreamReader, lines: list[str]
    ) -> None:
        self.name = name
        self.lines = lines
        self._process = process
        self._answers = answers

    async def measure(self, line: str) -> float:
        """Take one sample of a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return float(await _answer(self.name, self._answers))


async def compare(peers: Sequence[str], pythons: Mapping[str, str], turns: int) -> Samples:
    """Measure aiodaft and its peers in turns.

    Args:
        peers: Those of `PEERS` that are to be measured; one that is not installed is left out, with a message.
        pythons: The interpreters of peers that are not installed next to aiodaft.
        turns: The number of samples of each line.
    """
    samples: Samples = {}
    found: dict[str, str] = {}
    for name in (OURS, *peers):
        python = pythons.get(name, sys.executable)
        if await _has(python, name, _MODULES):
            found[name] = python
            for _ in range(min(turns, 3)):
                samples.setdefault(_HELLO, {}).setdefault(name, []).append(await _hello(name, python))
    await _measure(samples, "open_lines", found, turns)
    await _measure(samples, "open_graphs", {name: found[name] for name in (OURS, "ray") if name in found}, turns)
    if web.missing():
        print(f"there is no {web.missing()}: servers are left out", file=sys.stderr)
    else:
        serving = {name: python for name, python in found.items() if name in _WEB and await _has(python, name, _WEB)}
        await _measure(samples, "open_web", serving, turns)
    return samples


async def _measure(samples: Samples, opening: str, pythons: Mapping[str, str], turns: int) -> None:
    """Measure, in turns, the lines that a function of the modules of `peers` opens."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(_open(name, python, opening)) for name, python in pythons.items()]
        for line in opened[0].lines:
            print(f"measuring {line} ...", file=sys.stderr)
            measured = samples[line] = {peer.name: [] for peer in opened if line in peer.lines}
            for turn in range(turns + 1):
                for peer in opened:
                    if line in peer.lines:
                        sample = await peer.measure(line)
                        # The first one warms up.
                        measured[peer.name] += [sample] if turn else []


def comparison(samples: Samples, peers: Sequence[str]) -> str:
    """The samples as a table: the median of each framework and how many times worse than aiodaft it is."""
    names = [name for name in (OURS, *peers) if any(name in of_line for of_line in samples.values())]
    lines = ["".join([f"{'':46}", *(f"{name:>20}" for name in names)])]
    for line, of_line in samples.items():
        cells = [_cell(line, of_line, name) for name in names]
        lines.append("".join([f"{line:46}", *(f"{cell:>20}" for cell in cells)]))
    return "\n".join(lines)


def ratio(line: str, samples: Mapping[str, Sequence[float]], name: str) -> float:
    """The factor by which a framework is worse than aiodaft: the median over the turns."""
    pairs = zip(samples[name], samples[OURS], strict=True)
    return median(ours / theirs if _RATE in line else theirs / ours for theirs, ours in pairs)


def plot(samples: Samples, peers: Sequence[str], file: str) -> None:
    """Draw the ratios as bars.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(10, 1 + 0.2 * len(samples) * len(peers)), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(peers):
        bars = [(place, ratio(line, of, name)) for place, (line, of) in enumerate(samples.items()) if name in of]
        places = [place + number * 0.8 / len(peers) for place, _ in bars]
        axes.barh(places, [width for _, width in bars], 0.8 / len(peers), label=name)
    axes.set_yticks([place + 0.4 for place in range(len(samples))], list(samples))
    axes.axvline(1.0, color="black")
    axes.set_xscale("log")
    axes.set_xlabel(f"times worse than {OURS} (median of ratios)")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(file)


def _cell(line: str, samples: Mapping[str, Sequence[float]], name: str) -> str:
    if name not in samples:
        return "-"
    value = f"{median(samples[name]):,.4g}"
    return value if name == OURS else f"{value} ({ratio(line, samples, name):.2g}x)"


def _command(name: str, python: str, opening: str = "open_lines") -> tuple[list[str], dict[str, str]]:
    """The command that runs a module of `peers`, which needs no aiodaft. Its classes must not belong to `__main__`."""
    start = f"with_{name}.{opening}" + (", aiodaft.run" if name == OURS else "")
    code = (
        f"import {_MODULES.get(name, name)}\nfrom benchmarks.peers import serving, with_{name}\nserving.serve({start})"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return [python, "-c", code], {**os.environ, "PYTHONPATH": path}


async def _has(python: str, name: str, modules: Mapping[str, str]) -> bool:
    module = modules.get(name, name)
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    process = await asyncio.create_subprocess_exec(python, "-c", code)
    if await process.wait():
        print(f"{module} is not installed for {python}: left out", file=sys.stderr)
    return process.returncode == 0


async def _hello(name: str, python: str) -> float:
    command, environment = _command(name, python)
    start = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError(f"{name} failed; see what it printed above")
    return time.perf_counter() - start


@asynccontextmanager
async def _open(name: str, python: str, opening: str) -> AsyncGenerator[Peer]:
    reading, writing = os.pipe()
    answers = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(reading, "rb"))
    command, environment = _command(name, python, opening)
    try:
        process = await asyncio.create_subprocess_exec(
            *[*command, str(writing)],
            env=environment,
            pass_fds=(writing,),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
    finally:
        os.close(writing)
    try:
        yield Peer(name, process, answers, json.loads(await _answer(name, answers)))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _answer(name: str, answers: asyncio.StreamReader) -> bytes:
    answer = await answers.readline()
    if not answer:
        raise RuntimeError(f"{name} failed; see what it printed above")
    return answer
