"""`aiodaft COMMAND`, also as `python -m aiodaft.cli`."""

from __future__ import annotations

import argparse
from typing import Final

from aiodaft import __version__
from aiodaft._runtime.coordination.coordinator import LEASE
from aiodaft.program import run

from .cluster import add_address, drain_node, end_cluster, show_processes, stop_actor
from .doctor import add_address as add_doctor
from .doctor import examine
from .key import new_key
from .node import add_arguments, parse_lease, parse_seconds, serve
from .run import add_run, run_script
from .stack import show_stacks

_OF_CLUSTERS: Final = {"ps": show_processes, "stop": stop_actor, "drain": drain_node, "down": end_cluster}


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aiodaft", description="Distributed actors, futures and tasks for asyncio.")
    parser.add_argument("--version", action="version", version=f"aiodaft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    help_ = "say what works on this machine and between the hosts of a cluster, how fast, and why the rest does not"
    add_doctor(commands.add_parser("doctor", help=help_))
    stack = commands.add_parser("stack", help="show the stacks of every process of a running controller")
    stack.add_argument("--pid", type=int, help="the controller's process; default: all controllers of this user")
    key = commands.add_parser("key", help="make the key of a cluster").add_subparsers(dest="action", required=True)
    new = key.add_parser("new", help="make a key file; every machine of the cluster needs a copy")
    new.add_argument("--encrypt-payloads", action="store_true", help="values between hosts are encrypted, too")
    new.add_argument("path", nargs="?", help="default: $AIODAFT_KEY_FILE, or ~/.config/aiodaft/key")
    up = commands.add_parser("up", help="serve this machine as the first node of a cluster")
    help_ = "seconds after which a silent node is out of the cluster, at least 1"
    up.add_argument("--lease", type=parse_lease, default=LEASE, help=help_)
    help_ = "keep names and nodes in this file, or in etcd://HOST:PORT[,HOST:PORT...][/PREFIX]; default: in memory"
    up.add_argument("--state", metavar="STATE", help=help_)
    help_ = "without --state: wait until the nodes of a coordinator that was here before say what names they hold"
    up.add_argument("--recover", action="store_true", help=help_)
    add_arguments(up)
    join = commands.add_parser("join", help="serve this machine as another node of a cluster")
    join.add_argument("address", help="where another node of the cluster listens, such as tcp://10.0.0.1:7777")
    add_arguments(join)
    add_run(commands.add_parser("run", help="run a script with a cluster: of this machine, or of a job's machines"))
    add_address(commands.add_parser("ps", help="show the nodes of a cluster, and the actors on them"))
    stop = commands.add_parser("stop", help="stop an actor of a cluster, such as one that has outlived its program")
    stop.add_argument("name", help="its name; aiodaft ps shows it")
    add_address(stop)
    drain = commands.add_parser("drain", help="end a node when its actors have gone to others, and wait for that")
    drain.add_argument("node", help="the name of the node")
    add_address(drain)
    help_ = "seconds after which what is left on the node is ended; default: %(default)g"
    drain.add_argument("--grace", type=parse_seconds, default=30.0, metavar="SECONDS", help=help_)
    add_address(commands.add_parser("down", help="end all nodes of a cluster"))
    arguments = parser.parse_args()
    if arguments.command in _OF_CLUSTERS:
        return run(_OF_CLUSTERS[arguments.command](arguments))
    if arguments.command == "run":
        return run(run_script(arguments))
    if arguments.command in {"up", "join"}:
        return run(serve(arguments))
    if arguments.command == "key":
        return new_key(arguments.path, encrypt_payloads=arguments.encrypt_payloads)
    return show_stacks(arguments.pid) if arguments.command == "stack" else run(examine(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
