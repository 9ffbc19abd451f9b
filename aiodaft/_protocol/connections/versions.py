"""The check that processes of a cluster understand each other, by the versions of aiodaft and of Python."""

from __future__ import annotations

from typing import NamedTuple

from aiodaft.exceptions import VersionMismatch

__version__ = "0.1.0"


class Software(NamedTuple):
    """`python`: the interpreter and its version, such as "cpython 3.12.1"."""

    release: str
    python: str

    def check_works_with(self, other: Software, where: str) -> None:
        """Raise VersionMismatch if this process and the one at `where` do not understand each other.

        All but the last number has to be the same. This makes classes of processes, so each node and program has to ask
        only one other member of the cluster.
        """
        for what, own, others, why in (
            ("aiodaft", self.release, other.release, "releases work together if only their last numbers differ"),
            ("Python", self.python, other.python, "code that is sent needs the same version, but for its last number"),
        ):
            if _series(own) != _series(others):
                raise VersionMismatch(
                    f"the node at {where} runs {what} {others}, and this process {own}: {why}. Install "
                    f"{_series(others)} here, or {_series(own)} on all machines of the cluster"
                )


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
