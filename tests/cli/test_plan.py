"""`aiodaft plan`: the cost of a step of the program of a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")

from aiodaft.cli.__main__ import main
from aiodaft.tensor.hardware import Hardware, Link

SCRIPT = """
import torch
from aiodaft import tensor
from beside_it import ROWS

def step(model, x):
    return model(x).sum()

def program():
    return tensor.capture(step, torch.nn.Linear(40, 80, bias=False), torch.zeros(ROWS, 40))

if __name__ == "__main__":
    raise SystemExit("it was run as a program")
"""
STRATEGY = '{"params": {"weight": {"tp": "S(0)"}}}'
# A product of 64,000 operations takes a second.
HARDWARE = Hardware(
    compute={"float32": 64e3},
    memory=1e6,
    bandwidth=float("inf"),
    overhead=0.0,
    links=(Link(devices=2, bandwidth=float("inf"), latency=1.0),),
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside_it.py").write_text("ROWS = 20\n")
    (tmp_path / "mine.json").write_text(STRATEGY)
    (tmp_path / "lab.json").write_text(HARDWARE.to_json())
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def plan(script: Path, *more: str, axes: str = "tp=2") -> Result:
    here = script.parent
    given = ["--strategy", str(here / "mine.json"), "--axes", axes, "--hardware", str(here / "lab.json")]
    return CliRunner().invoke(main, ["plan", str(script), *given, *more])


def test_a_script_is_planned_and_its_step_has_a_time_and_a_picture(script: Path, tmp_path: Path) -> None:
    done = plan(script, "--draw", str(tmp_path / "step.svg"), "--trace", str(tmp_path / "step.json"))
    assert (done.exit_code, done.stderr) == (0, "")
    # Half of the product at each rank, and the sum of the halves.
    assert "2 ranks (tp=2): 1 collectives" in done.stdout
    assert "2.00 s a step; a rank computes for 1.00 s (50%), waits at most: tp 50%" in done.stdout
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    answer: dict[str, Any] = json.loads(plan(script, "--json").stdout)
    assert answer["strategy"] == json.loads(STRATEGY)
    assert (answer["axes"], answer["received"], answer["waits"]) == ({"tp": 2}, {"tp": 4}, {"tp": 1.0})
    assert answer["memory"] == 4 * (40 * 40 + 20 * 40 + 20 * 40)


def test_a_search_gives_a_strategy_whose_plan_takes_what_it_says(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    given = ["plan", str(script), "--gpus", "2", "--hardware", str(tmp_path / "lab.json"), "--json"]
    found = CliRunner().invoke(main, [*given, "--write", str(tmp_path / "mine.json")])
    assert (found.exit_code, found.stderr) == (0, "")
    answer = json.loads(found.stdout)
    assert answer["strategy"] == json.loads((tmp_path / "mine.json").read_text())
    axes = ",".join(f"{name}={size}" for name, size in answer["axes"].items())
    assert json.loads(plan(script, "--json", axes=axes).stdout) == answer
    # By replicas it takes 2 seconds; in parts 1, and one more for the sum.
    assert answer["seconds"] == 2
    refused = CliRunner().invoke(main, [*given, "--memory", "1e-9"])
    assert refused.exit_code == 1
    assert "no strategy was found that holds in 1 B: the least takes 10.4 kB" in refused.stderr


@pytest.mark.parametrize(
    ("more", "axes", "status", "words"),
    [
        (("--memory", "1e-6"), "tp=2", 1, "rank 0 takes 12.8 kB: 11.8 kB more than it has"),
        ((), "tp=4", 1, "the plan is for 4 ranks, and the hardware has 2 devices"),
        ((), "dp=2", 1, "there is no axis tp: the axes are dp"),
        ((), "tp:2", 2, "--axes is 'tp:2': give names and sizes"),
        ((), "", 2, "give --gpus, or --strategy and --axes"),
        (("--gpus", "2"), "tp=2", 2, "give --gpus, or --strategy and --axes"),
    ],
)
def test_what_cannot_be_planned_is_said(
    script: Path, more: tuple[str, ...], axes: str, status: int, words: str
) -> None:
    done = plan(script, *more, axes=axes)
    assert (done.exit_code, words in done.stderr) == (status, True), done.stderr


def test_a_weak_device_is_compared_with_its_own_memory(script: Path, tmp_path: Path) -> None:
    lab = json.loads((tmp_path / "lab.json").read_text())
    weak = {**lab, "memory": 12_900, "uneven": {"1": {"memory": 0.5}}}
    (tmp_path / "lab.json").write_text(json.dumps(weak))
    done = plan(script)
    assert (done.exit_code, "rank 1 takes 12.8 kB: 6.3 kB more than it has" in done.stderr) == (1, True), done.stderr


def test_a_script_without_a_program_is_told_what_to_write(script: Path) -> None:
    script.write_text("program = 5\n")
    done = plan(script)
    assert done.exit_code == 1
    assert "has no program: write `def program(): return tensor.capture(...)`" in done.stderr
