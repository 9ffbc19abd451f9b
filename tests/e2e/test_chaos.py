"""The chaos run: its events follow from its seed, and it sees a broken promise."""

import resource
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
from chaos import run
from chaos.command import main
from chaos.deeds import WrongValue
from chaos.judge import Hang, judge
from chaos.plan import ACTORS, CREW, Deed, Fault, Harm, Op, Round, rounds, transport_of
from chaos.run import _no_more_descriptors, torment
from chaos.stage import Machine

from aiodaft import ActorDied, CallCancelled, Overloaded
from aiodaft.exceptions import PeerLost

CALL = Op(100, Deed.CALL, 0.0, (0, 1, 2), 10)
CANCEL = Op(100, Deed.CANCEL, 0.0, (0, 1, 2), 10)
ONCE = Counter({100: 1})
NEVER: Counter[int] = Counter()


def test_a_seed_decides_everything_that_is_tried() -> None:
    assert list(islice(rounds(3), 5)) == list(islice(rounds(3), 5))
    assert list(islice(rounds(3), 5)) != list(islice(rounds(4), 5))


def test_payloads_travel_in_every_way() -> None:
    assert {transport_of(seed) for seed in range(20)} == {"shm", "tcp", "ucx"}


def test_a_process_gets_no_descriptors_for_a_moment() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    # Once it answers, it has loaded its libraries.
    child.stdin.write(b"?")
    assert child.stdout.read(1) == b"?"
    before = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
    with _no_more_descriptors(child.pid):
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (3, before[1])
    assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == before
    child.communicate()


def test_numbers_of_calls_never_meet() -> None:
    ids = [op.id for round_ in islice(rounds(0), 50) for op in round_.ops]
    assert all(later - earlier >= ACTORS for earlier, later in pairwise(ids))


def test_who_is_followed_must_come_back_unless_it_was_stopped() -> None:
    faults = (
        Fault(Harm.KILL, 0, 0, 0),
        Fault(Harm.KILL, 0, 1, 0),
        Fault(Harm.STOP, 0, 1, 0),
        Fault(Harm.STOP, 0, 4, 0),
    )
    assert Round((), faults).survivors() == (0, *CREW)
    assert Round((), faults).unharmed() == (2, 3, *CREW)


@pytest.mark.parametrize(
    ("op", "error", "ran", "hurt", "found"),
    [
        (CALL, None, ONCE, False, None),
        (CALL, None, NEVER, False, "did not run"),
        (CALL, None, Counter({100: 2}), False, "more than once"),
        (CALL, WrongValue("x"), ONCE, True, "x"),
        (CALL, Hang("no end"), ONCE, True, "no end"),
        (CALL, ActorDied("x"), ONCE, True, None),
        (CALL, ActorDied("x"), ONCE, False, "nothing was harmed"),
        (CALL, ActorDied("x", executed=False), ONCE, True, "says that it did not run, and it did"),
        (CALL, ActorDied("x", executed=False), NEVER, True, None),
        (CALL, Overloaded("x"), NEVER, False, "nothing was harmed"),
        (CALL, PeerLost("x"), ONCE, False, "nothing was harmed"),
        (CALL, OSError("x"), ONCE, True, None),
        (CALL, OSError("x"), ONCE, False, "the system refused"),
        (CALL, TimeoutError("x"), ONCE, False, "it was not given up"),
        (CALL, CallCancelled("x"), ONCE, False, "it was not given up"),
        (CANCEL, CallCancelled("x"), ONCE, False, None),
        (CANCEL, TimeoutError("x"), ONCE, False, None),
    ],
)
def test_the_judge(op: Op, error: BaseException | None, ran: Counter[int], hurt: bool, found: str | None) -> None:
    violations = list(judge(op, error, ran, hurt=hurt))
    assert len(violations) == (found is not None)
    assert found is None or found in violations[0]


async def test_a_little_chaos(tmp_path: Path) -> None:
    with Machine.with_small_disk(tmp_path / "logs") as machine:
        report = await torment(23, 0, tmp_path, machine, rounds_per_runtime=2)
    assert report.violations == []
    assert report.rounds == 2
    # A member of the group lost its connection to the controller.
    assert report.faults == {"freeze": 1, "trouble": 1, "no threads": 1, "cut": 1}
    assert report.returns == 1
    assert report.outcomes["value"] > 0


def test_a_little_chaos_of_simulated_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--hosts", "4", "--seed", "3", "--minutes", "0"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["1 programs on 4 simulated hosts", "  broken promises of --seed 3: 0"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_minutes_of_chaos() -> None:
    command = [sys.executable, Path(run.__file__).parent, "--minutes", "10"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
