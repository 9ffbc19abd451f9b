"""Runs random programs in the simulation: `python tests/support/run_seeds.py sim_hosts:HostProgram 0 200`.

Prints the faults, by seed. With one seed, prints its trace too.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from sim_program import Program
from simulated.simulated_loop import collect


def main() -> int:
    """Returns the number of seeds in which something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="sim_program:Program, sim_hosts:HostProgram, or another class of that kind")
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("end", type=int, nargs="?", help="the seed after the last one")
    given = parser.parse_args()
    module, name = given.program.split(":")
    kind: type[Program] = getattr(importlib.import_module(module), name)
    failed = 0
    for seed in range(given.first, given.end or given.first + 1):
        program = kind(seed)
        wrong = program.run()
        if given.end is None:
            print(*program.world.trace, sep="\n")
        if wrong:
            failed += 1
            print(f"seed {seed}:", *wrong, sep="\n  ", flush=True)
        collect()
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
