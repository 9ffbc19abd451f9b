"""`aiodaft doctor`: tries the functions of this machine and of the hosts of a cluster, and prints the results."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import operator
import os
import platform
import resource
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import permutations
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

import click

import aiodaft
from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.connections.versions import Software
from aiodaft._protocol.coordination.records import Member
from aiodaft._protocol.node.resources import gpu_names
from aiodaft._runtime.connections.identity import Identity, find_key_file, load_identity
from aiodaft._runtime.platform.capabilities import missing
from aiodaft._runtime.platform.linux import interface_to, interfaces
from aiodaft._runtime.process import machine_gpus
from aiodaft.actor import Actor
from aiodaft.cli.options import FAILED, Output, address_argument, json_option, key_file_option
from aiodaft.exceptions import DaftError, VersionMismatch
from aiodaft.methods import method
from aiodaft.program import run
from aiodaft.runtime import Runtime
from aiodaft_transport import NAMES, TransportError, default_name
from aiodaft_transport.cuda.libcuda import CudaDriver
from aiodaft_transport.system import usable_cpus
from aiodaft_transport.ucx import INTERFACE_VARIABLE

_CALLS: Final = 100
_SECONDS: Final = 0.1
_FEWEST: Final = 3
_SMALLEST: Final = 1 << 20
_LARGEST: Final = 64 << 20


class Facts(NamedTuple):
    python: str
    aiodaft: str
    interfaces: dict[str, list[str]]
    ucx: str

    def __str__(self) -> str:
        shown = [f"{name} {' '.join(ips)}" for name, ips in self.interfaces.items() if name != "lo"]
        if self.ucx:
            shown.append(f"ucx over {self.ucx}")
        return "  ".join([f"python {self.python}, aiodaft {self.aiodaft}", *shown])


def facts() -> Facts:
    return Facts(platform.python_version(), aiodaft.__version__, interfaces(), os.environ.get(INTERFACE_VARIABLE) or "")


class Probe(Actor, cpus=0):
    def __init__(self) -> None:
        self._value = b""

    @method
    async def facts(self) -> Facts:
        return facts()

    @method
    async def echo(self) -> None: ...

    @method
    async def prepare(self, size: int) -> None:
        self._value = bytes(size)

    @method(transport="tcp")
    async def give_tcp(self) -> bytes:
        return self._value

    @method(transport="ucx")
    async def give_ucx(self) -> bytes:
        return self._value

    @method
    async def call(self, other: Probe) -> float:
        return await call(other)

    @method
    async def fetch(self, other: Probe, transport: str) -> float:
        return await fetch(other, transport)

    @method
    async def way(self, address: str) -> str:
        return way(address)


async def call(other: Probe) -> float:
    """The median of the measured calls, in seconds."""
    await other.echo()
    taken: list[float] = []
    while len(taken) < _FEWEST or (sum(taken) < _SECONDS and len(taken) < _CALLS):
        taken.append(await _timed(other.echo))
    return median(taken)


async def fetch(other: Probe, transport: str) -> float:
    """The best that was seen."""
    give, size, best = {"tcp": other.give_tcp, "ucx": other.give_ucx}[transport], _SMALLEST, 0.0
    while True:
        await other.prepare(size)
        # The first one opens the connections and memory that the others use.
        await give()
        seconds = min([await _timed(give) for _ in range(_FEWEST)])
        best = max(best, size / seconds)
        if size == _LARGEST or seconds > _SECONDS:
            return best
        size *= 4


async def _timed(step: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await step()
    return time.perf_counter() - start


def way(address: str) -> str:
    with suppress(OSError):
        here = interface_to(address)
        return next((name for name, ips in interfaces().items() if here in ips), "")
    return ""


T = TypeVar("T")

_PATIENCE: Final = 20.0
_HEAD: Final = ("from", "to", "over", "call", "tcp", "ucx")
_HERE: Final = "(here)"
_REFUSED: Final = os.strerror(errno.ECONNREFUSED)
# Texts of errors, and the advice for each; the first one that fits.
_ADVICE: Final = (
    ("another key", "", "copy the key file of the cluster, or name it by `--key-file` or $AIODAFT_KEY_FILE"),
    ("speak this protocol", "", "another program listens there"),
    (
        _REFUSED, "tcp://127.",
        "127.0.0.1 leads to the machine itself only: `--listen` has to name an address that others reach",
    ),
    (_REFUSED, "", "nothing listens there: is the node running, with `--listen` at this address?"),
    (os.strerror(errno.EHOSTUNREACH), "", "no host of the network has this address, or a router refuses"),
    (os.strerror(errno.ENETUNREACH), "", "no interface of the machine leads to this address"),
    ("no answer", "", "a firewall may drop packets to it, the host may be off, or the process is stopped"),
)  # fmt: skip


class _End(NamedTuple):
    facts: Facts
    way: Callable[[str], Awaitable[str]]
    call: Callable[[Probe], Awaitable[float]]
    fetch: Callable[[Probe, str], Awaitable[float]]


async def examine_hosts(address: str, key_file: str | None, names: Collection[str], output: Output) -> bool:
    """Report on the ways between this machine and the nodes, and between these; returns whether all work.

    Args:
        names: The nodes to look at; empty: all.
    """
    try:
        identity = load_identity(key_file)
        key = {"path": str(find_key_file(key_file)), "cluster": identity.key.cluster.hex()[:12]}
        output.document["key"] = key
        output.line(f"{'key':16} {key['path']}, of cluster {key['cluster']}")
        host, _ = parse_address(address)
        if not host.strip("0.:"):
            raise ValueError(f"{host} means all interfaces of a machine: say the address that others reach")
        async with Runtime(address, key_file=key_file, unhandled="log") as rt:
            return await _Examination(rt, identity, output).run(names)
    except (DaftError, TransportError, OSError, ValueError) as error:
        output.document["problems"] = [_explained(error)]
        output.line(f"{'cluster':16} does not work: {_explained(error)}")
        return False


class _Examination:
    def __init__(self, rt: Runtime, identity: Identity, output: Output) -> None:
        self._rt = rt
        self._output = output
        self._encrypted = identity.encrypts_payloads
        self._problems: list[str] = []
        self._members: dict[str, Member] = {}
        self._probes: dict[str, Probe] = {}
        self._ends: dict[str, _End] = {}

    async def run(self, names: Collection[str]) -> bool:
        members = {member.name: member for member in self._rt._controller.nodes.members()}
        if unknown := [name for name in names if name not in members]:
            raise ValueError(f"there is no node {', '.join(unknown)}, only {', '.join(members)}")
        self._output.document |= {"hosts": {_HERE: facts()._asdict()}, "ways": [], "problems": self._problems}
        self._ends[_HERE] = _End(facts(), _way, call, fetch)
        self._output.line(f"{_HERE:16} {facts()}")
        await asyncio.gather(*(self._probe(member) for name, member in members.items() if not names or name in names))
        width = max(map(len, self._ends))
        self._show(width, *_HEAD)
        for source, target in permutations(self._ends, 2):
            if target != _HERE:
                await self._measure(source, target, width)
        for number, problem in enumerate(self._problems, 1):
            self._output.line(f"{number}. {problem}")
        return not self._problems

    async def _probe(self, member: Member) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                probe = await self._rt.on(node=member.name).spawn(Probe)
                theirs = await probe.facts()
        except Exception as error:  # noqa: BLE001 - every error is a finding
            self._note(f"node {member.name} at {member.address}", error)
            return
        self._members[member.name], self._probes[member.name] = member, probe
        self._ends[member.name] = _End(theirs, probe.way, probe.call, probe.fetch)
        self._output.document["hosts"][member.name] = {**theirs._asdict(), "address": member.address}
        self._output.line(f"{member.name:16} {theirs}, at {member.address}")
        ours = facts()
        try:
            there = Software(theirs.aiodaft, theirs.python)
            Software(ours.aiodaft, ours.python).check_works_with(there, member.address)
        except VersionMismatch as error:
            self._problems.append(str(error))

    async def _measure(self, source: str, target: str, width: int) -> None:
        begin, probe, where = self._ends[source], self._probes[target], f"{source} to {target}"
        way: dict[str, Any] = {"from": source, "to": target}
        self._output.document["ways"].append(way)

        async def measured(key: str, what: str, measuring: Awaitable[T], show: Callable[[T], str]) -> str:
            try:
                async with asyncio.timeout(_PATIENCE):
                    way[key] = found = await measuring
                return show(found)
            except Exception as error:  # noqa: BLE001 - every error is a finding
                self._note(what, error)
                return f"fails ({len(self._problems)})"

        address = self._members[target].address
        over = await measured("interface", f"{where}: interface", begin.way(address), str)
        called = await measured("call_seconds", where, begin.call(probe), lambda seconds: f"{seconds * 1e3:.2f} ms")
        row = [over or "?", called]
        for transport, used in (("tcp", True), ("ucx", self._uses_ucx(source, target))):
            if not used or called.startswith("fails"):
                row.append("-")
                continue
            key, fetching = f"{transport}_bytes_per_second", begin.fetch(probe, transport)
            row.append(await measured(key, f"{where}, {transport}", fetching, lambda speed: f"{speed / 1e6:,.0f} MB/s"))
        self._show(width, source, target, *row)

    def _show(self, width: int, source: str, target: str, *cells: str) -> None:
        over, called, tcp, ucx = cells
        self._output.line(f"{source:{width}}  {target:{width}}  {over:10}  {called:>10}  {tcp:>11}  {ucx:>11}")

    def _uses_ucx(self, source: str, target: str) -> bool:
        return not self._encrypted and any(self._ends[name].facts.ucx for name in (source, target))

    def _note(self, what: str, error: Exception) -> None:
        self._problems.append(f"{what}: {_explained(error)}")


async def _way(address: str) -> str:  # noqa: RUF029 - as that of an actor
    return way(address)


def _explained(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"there was no answer in {_PATIENCE:g} s"
    text = str(error) or type(error).__name__
    advice = next((advice for words, more, advice in _ADVICE if words in text and more in text), "")
    return f"{text}; {advice}" if advice else text


_SIZE: Final = 1 << 20


@click.command()
@address_argument
@click.argument("nodes", nargs=-1)
@key_file_option
@json_option
def doctor(address: str | None, nodes: tuple[str, ...], key_file: str | None, as_json: bool) -> int:
    """Test this machine and a cluster, and report speeds and faults.

    ADDRESS: the address of a node of a cluster; by default this machine, and the cluster of $AIODAFT_ADDRESS. NODES:
    the nodes to look at; by default all. The exit status is 0 if actors work on this machine, and all of the cluster.
    """
    output = Output(as_json=as_json)
    works = run(_examine(address, key_file, nodes, output))
    output.document["works"] = works
    output.end()
    return 0 if works else FAILED


async def _examine(given: str | None, key_file: str | None, nodes: tuple[str, ...], output: Output) -> bool:
    address = os.environ.pop("AIODAFT_ADDRESS", None)
    works = given is not None or await _examine_machine(output)
    if address := given or address:
        works &= await examine_hosts(address, key_file, nodes, output)
    return works


async def _examine_machine(output: Output) -> bool:
    found: dict[str, Any] = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{package: _version(package) for package in ("uvloop", "torch", "numpy")},
        "gpus": len(gpu_names(machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))),
        "cpus": usable_cpus(),
        "interfaces": interfaces(),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    shown = {
        **found,
        "interfaces": ", ".join(f"{name} {' '.join(ips)}" for name, ips in found["interfaces"].items()),
        "open files": f"{found['open files']:,} per process",
    }
    for what, value in shown.items():
        output.line(f"{what:16} {'not installed' if value is None else value}")
    output.document["machine"] = found
    output.document["missing"] = lacking = missing()
    for what, so in lacking.items():
        output.line(f"{what:16} {click.style('not on this system', 'yellow')}: {so}")
    tried = output.document["transports"] = {}
    for name in NAMES:
        tried[name] = await _try(name, partial(_message, name), output, ", the default" * (name == default_name()))
    working = [name for name in NAMES if tried[name]["works"]]
    tried["cuda"] = await _try("cuda", _cuda_tensor, output, ", for CUDA tensors")
    return bool(working)


async def _try(name: str, trip: Callable[[], Awaitable[float]], output: Output, note: str) -> dict[str, Any]:
    """Whether a transport works, and how many seconds 1 MiB took there and back, or why it does not."""
    try:
        seconds = await trip()
    except (TransportError, _Wrong) as error:
        trouble = str(error)
    except Exception as error:  # noqa: BLE001 - every error is a finding
        trouble = f"{type(error).__name__}: {error}"
    else:
        works = click.style("works", "green")
        output.line(f"{f'transport {name}':16} {works}{note}: 1 MiB there and back in {seconds * 1e3:.1f} ms")
        return {"works": True, "seconds": seconds}
    output.line(f"{f'transport {name}':16} {click.style('does not work', 'red')}: {trouble}")
    return {"works": False, "why": trouble}


class _Echo(Actor):
    @method
    async def same(self, value: Any) -> Any:
        return value


class _Wrong(Exception):
    """A value came back changed, or by another route."""


async def _message(transport: str) -> float:
    return await _round_trip(bytes(_SIZE), operator.eq, transport)


async def _cuda_tensor() -> float:
    CudaDriver().close()
    import torch  # noqa: PLC0415 - optional package

    return await _round_trip(torch.arange(_SIZE, dtype=torch.uint8, device="cuda"), torch.equal, None)


async def _round_trip(value: Any, same: Callable[[Any, Any], bool], transport: str | None) -> float:
    """Seconds that a value takes to an actor and back; without a transport, from GPU to GPU."""
    async with asyncio.timeout(_PATIENCE), Runtime(transport=transport, preload=()) as rt, rt.spawn(_Echo) as echo:
        await echo.same(value)
        start = time.perf_counter()
        if not same(await echo.same(value), value):
            raise _Wrong("the value that came back differs from the one that was sent")
        if transport is None and not rt.traffic().device_received:
            raise _Wrong("the value went through host memory")
        return time.perf_counter() - start


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
