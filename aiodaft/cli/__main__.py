"""`aiodaft COMMAND`, also as `python -m aiodaft.cli`."""

from __future__ import annotations

import argparse

from aiodaft import __version__
from aiodaft.runtime import run

from .doctor import examine


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aiodaft", description="Distributed actors, futures and tasks for asyncio.")
    parser.add_argument("--version", action="version", version=f"aiodaft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what works on this machine, what does not, and why")
    parser.parse_args()
    return run(examine())


if __name__ == "__main__":
    raise SystemExit(main())
