"""`aiodaft doctor ADDRESS`: which hosts of a cluster reach each other, over what, how fast, and what is wrong."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Collection
from itertools import permutations
from typing import Final, NamedTuple, TypeVar

from aiodaft._protocol.connections.address import parse_address
from aiodaft._protocol.connections.versions import Software
from aiodaft._protocol.coordination.records import Member
from aiodaft._runtime.connections.identity import Identity, find_key_file, load_identity
from aiodaft.exceptions import DaftError, VersionMismatch
from aiodaft.runtime import Runtime
from aiodaft_transport import TransportError

from .probe import Facts, Probe, call, facts, fetch, way

T = TypeVar("T")

# Seconds for one measurement: more than connecting may take.
_PATIENCE: Final = 20.0
_HEAD: Final = ("from", "to", "over", "call", "tcp", "ucx")
_HERE: Final = "(here)"
_REFUSED: Final = os.strerror(errno.ECONNREFUSED)
# What an error says, and what it comes from; the first one that fits.
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
    ("no answer", "", "a firewall may drop what goes there, the host may be off, or the process is stopped"),
)  # fmt: skip


class _End(NamedTuple):
    """A process that measures its way to others."""

    facts: Facts
    way: Callable[[str], Awaitable[str]]
    call: Callable[[Probe], Awaitable[float]]
    fetch: Callable[[Probe, str], Awaitable[float]]


async def examine_hosts(address: str, key_file: str | None, names: Collection[str]) -> bool:
    """Print what works between this machine and the nodes, and between these; returns whether all does.

    Args:
        address: Where a node of the cluster listens.
        key_file: The key of the cluster; None: where all commands look for it.
        names: The nodes to look at; empty: all.
    """
    try:
        identity = load_identity(key_file)
        print(f"{'key':16} {find_key_file(key_file)}, of cluster {identity.key.cluster.hex()[:12]}")
        host, _ = parse_address(address)
        if not host.strip("0.:"):
            raise ValueError(f"{host} means all interfaces of a machine: say the address that others reach")
        async with Runtime(address, key_file=key_file, unhandled="log") as rt:
            return await _Examination(rt, identity).run(names)
    except (DaftError, TransportError, OSError, ValueError) as error:
        print(f"{'cluster':16} does not work: {_explained(error)}")
        return False


class _Examination:
    """What was found between the hosts of one cluster."""

    def __init__(self, rt: Runtime, identity: Identity) -> None:
        self._rt = rt
        self._encrypted = identity.encrypts_payloads
        self._problems: list[str] = []
        self._members: dict[str, Member] = {}
        self._probes: dict[str, Probe] = {}
        self._ends: dict[str, _End] = {}

    async def run(self, names: Collection[str]) -> bool:
        members = {member.name: member for member in self._rt._controller.nodes.members()}
        if unknown := [name for name in names if name not in members]:
            raise ValueError(f"there is no node {', '.join(unknown)}, only {', '.join(members)}")
        self._ends[_HERE] = _End(facts(), _way, call, fetch)
        print(f"{_HERE:16} {facts()}")
        await asyncio.gather(*(self._probe(member) for name, member in members.items() if not names or name in names))
        width = max(map(len, self._ends))
        _show(width, *_HEAD)
        for source, target in permutations(self._ends, 2):
            if target != _HERE:
                _show(width, source, target, *await self._measured(source, target))
        for number, problem in enumerate(self._problems, 1):
            print(f"{number}. {problem}")
        return not self._problems

    async def _probe(self, member: Member) -> None:
        """Start an actor on a node, and have it say what there is."""
        try:
            async with asyncio.timeout(_PATIENCE):
                probe = await self._rt.on(node=member.name).spawn(Probe)
                theirs = await probe.facts()
        except Exception as error:  # noqa: BLE001 - every error is a finding
            self._note(f"node {member.name} at {member.address}", error)
            return
        self._members[member.name], self._probes[member.name] = member, probe
        self._ends[member.name] = _End(theirs, probe.way, probe.call, probe.fetch)
        print(f"{member.name:16} {theirs}, at {member.address}")
        ours = facts()
        try:
            there = Software(theirs.aiodaft, theirs.python)
            Software(ours.aiodaft, ours.python).check_works_with(there, member.address)
        except VersionMismatch as error:
            self._problems.append(str(error))

    async def _measured(self, source: str, target: str) -> list[str]:
        """What the table says of the way from one to the other."""
        begin, probe, where = self._ends[source], self._probes[target], f"{source} to {target}"
        over = await self._cell(f"{where}: interface", begin.way(self._members[target].address), str)
        called = await self._cell(where, begin.call(probe), lambda seconds: f"{seconds * 1e3:.2f} ms")
        row = [over or "?", called]
        for transport, used in (("tcp", True), ("ucx", self._uses_ucx(source, target))):
            if not used or called.startswith("fails"):
                row.append("-")
                continue
            measured = begin.fetch(probe, transport)
            row.append(await self._cell(f"{where}, {transport}", measured, lambda speed: f"{speed / 1e6:,.0f} MB/s"))
        return row

    def _uses_ucx(self, source: str, target: str) -> bool:
        return not self._encrypted and any(self._ends[name].facts.ucx for name in (source, target))

    async def _cell(self, what: str, measuring: Awaitable[T], show: Callable[[T], str]) -> str:
        try:
            async with asyncio.timeout(_PATIENCE):
                return show(await measuring)
        except Exception as error:  # noqa: BLE001 - every error is a finding
            self._note(what, error)
            return f"fails ({len(self._problems)})"

    def _note(self, what: str, error: Exception) -> None:
        self._problems.append(f"{what}: {_explained(error)}")


def _show(width: int, source: str, target: str, over: str, called: str, tcp: str, ucx: str) -> None:
    print(f"{source:{width}}  {target:{width}}  {over:10}  {called:>10}  {tcp:>11}  {ucx:>11}", flush=True)


async def _way(address: str) -> str:  # noqa: RUF029 - as that of an actor
    return way(address)


def _explained(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"there was no answer in {_PATIENCE:g} s"
    text = str(error) or type(error).__name__
    advice = next((advice for words, more, advice in _ADVICE if words in text and more in text), "")
    return f"{text}; {advice}" if advice else text
