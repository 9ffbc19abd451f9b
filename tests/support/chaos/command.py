"""The `chaos` command."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path

from sim_hosts import HostProgram
from simulated.simulated_loop import collect

from aiodaft.program import run

from .orphans import kill_a_controller
from .run import Report, torment
from .stage import Machine

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Torment actors and controllers, and exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python tests/support/chaos", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 30), help="the seed that a run printed, to replay it"
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="for how long (default: 1)")
    help_ = "simulate programs on a cluster of so many hosts instead: partitions, resets, and hosts that die"
    parser.add_argument("--hosts", type=int, help=help_)
    parser.add_argument("--folder", type=Path, help="for notes (default: a temporary one)")
    options = parser.parse_args(arguments)
    print(f"chaos with --seed {options.seed} for {options.minutes:g} minutes", flush=True)
    if options.hosts is not None:
        sys.exit(_simulate(options.seed, options.minutes * 60, options.hosts))
    with tempfile.TemporaryDirectory(prefix="aiodaft-chaos-", dir=options.folder) as folder:
        reports = run(_run(options.seed, options.minutes * 60, Path(folder), kill=options.folder is None))
    print("\n".join(map(str, reports)))
    sys.exit(any(report.violations for report in reports))


def _simulate(seed: int, seconds: float, hosts: int) -> bool:
    """Run seeds from this one on, at least one; True if a promise was broken."""
    names, end = tuple(f"host{number}" for number in range(hosts)), time.monotonic() + seconds
    for number in count():
        wrong = HostProgram(seed + number, names).run()
        collect()
        if wrong or time.monotonic() >= end:
            print(f"{number + 1} programs on {hosts} simulated hosts")
            print(f"  broken promises of --seed {seed + number}: {len(wrong)}")
            print("\n".join(f"    {one}" for one in wrong))
            break
    return bool(wrong)


async def _run(seed: int, seconds: float, folder: Path, *, kill: bool) -> list[Report]:
    """Torment for the given time, with a controller killed after each part. Each part has a seed that follows."""
    rng = random.Random(seed)
    reports: list[Report] = []
    end = time.monotonic() + seconds
    while True:
        part = folder / str(len(reports))
        part.mkdir()
        # The disk of a process that is killed would stay.
        small_disk = Machine.with_small_disk(part / "logs") if kill else nullcontext(None)
        with small_disk as stage:
            reports.append(await torment(seed + len(reports), 0 if kill else seconds, part, stage))
        if kill and (violation := await kill_a_controller(rng, part)):
            reports[-1].violations.append(violation)
        if reports[-1].violations or time.monotonic() >= end:
            return reports
