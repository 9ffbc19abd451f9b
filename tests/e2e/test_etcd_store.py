"""A coordinator that stores in a real etcd of three members, which are killed and come back."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"

pytestmark = [
    pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd here: apt-get install etcd-server"),
    pytest.mark.skipif(
        importlib.util.find_spec("aetcd") is None, reason="aetcd is not installed: pip install 'aiodaft[etcd]'"
    ),
    pytest.mark.hosts,
    pytest.mark.timeout(180),
]
Run = Callable[[str], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def scenario(name: str) -> None:
        # A group of its own, so that the members of etcd end with a program that does not.
        command = [sys.executable, str(SUPPORT / "etcd_scenarios.py"), name, str(tmp_path)]
        program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, errors = program.communicate(timeout=80)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            _, errors = program.communicate()
            pytest.fail(f"{name} hangs: {errors}")
        assert program.returncode == 0, errors

    return scenario


def test_a_coordinator_goes_on_while_one_of_three_members_is_killed_and_another_takes_over(run: Run) -> None:
    run("a_coordinator_goes_on_while_one_of_three_members_is_killed_and_another_takes_over")


def test_a_coordinator_that_is_replaced_hears_of_it_at_once(run: Run) -> None:
    run("a_coordinator_that_is_replaced_hears_of_it_at_once")


def test_two_coordinators_on_one_etcd_never_grant_one_epoch(run: Run) -> None:
    run("two_coordinators_on_one_etcd_never_grant_one_epoch")


def test_a_coordinator_without_etcd_says_so_and_comes_back_with_it(run: Run) -> None:
    run("a_coordinator_without_etcd_says_so_and_comes_back_with_it")


def test_many_changes_at_once_are_stored_in_order(run: Run) -> None:
    run("many_changes_at_once_are_stored_in_order")


def test_a_member_that_most_others_do_not_hear_confirms_nothing(run: Run) -> None:
    run("a_member_that_most_others_do_not_hear_confirms_nothing")


def test_a_term_is_greater_than_the_time_and_than_the_last(run: Run) -> None:
    run("a_term_is_greater_than_the_time_and_than_the_last")


def test_other_data_is_refused(run: Run) -> None:
    run("other_data_is_refused")


def test_two_clusters_share_an_etcd_with_two_prefixes(run: Run) -> None:
    run("two_clusters_share_an_etcd_with_two_prefixes")


def test_a_watch_goes_on_without_gap_or_duplicate_when_its_member_is_killed(run: Run) -> None:
    run("a_watch_goes_on_without_gap_or_duplicate_when_its_member_is_killed")


def test_a_watch_that_begins_before_what_etcd_remembers_says_so(run: Run) -> None:
    run("a_watch_that_begins_before_what_etcd_remembers_says_so")
