"""Releases of aiodaft, and versions of Python, that differ only in their last numbers work together."""

from __future__ import annotations

import pytest

from aiodaft._protocol.connections.versions import Software, __version__
from aiodaft.exceptions import VersionMismatch

HERE = Software("0.3.1", "cpython 3.12.1")


def test_this_release_has_three_numbers() -> None:
    assert __version__.count(".") == 2


@pytest.mark.parametrize("other", [HERE, Software("0.3.12", "cpython 3.12.0rc1")])
def test_the_last_number_does_not_count(other: Software) -> None:
    HERE.check_works_with(other, "tcp://a:1")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("0.4.1", r"at tcp://a:1 runs aiodaft 0\.4\.1, and this process 0\.3\.1: .* Install 0\.4 here, or 0\.3 on all"),
        ("1.3.1", r"runs aiodaft 1\.3\.1, and this process 0\.3\.1"),
        ("0.30.1", r"runs aiodaft 0\.30\.1, and this process 0\.3\.1"),
    ],
)
def test_another_series_of_releases_is_refused_with_both_and_what_to_do(other: str, said: str) -> None:
    with pytest.raises(VersionMismatch, match=said):
        HERE.check_works_with(HERE._replace(release=other), "tcp://a:1")


@pytest.mark.parametrize("other", ["cpython 3.11.1", "cpython 3.13.0", "pypy 3.12.1"])
def test_another_python_is_refused_with_both_and_what_to_do(other: str) -> None:
    with pytest.raises(VersionMismatch, match=rf"runs Python {other}, and this process cpython 3\.12\.1: .* Install"):
        HERE.check_works_with(HERE._replace(python=other), "tcp://a:1")
