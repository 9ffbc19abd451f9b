"""The examples, run as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_example import run_example

pytestmark = pytest.mark.programs


def test_hello_says_hello() -> None:
    assert run_example("hello.py") == "hello, world\n"


def test_what_dies_goes_on_from_its_checkpoint() -> None:
    output = run_example("restarts.py")
    said = [line for line in output.splitlines() if not line.startswith("Counter-1 died: restart")]
    assert said[:5] == ["1 at attempt 1", "2 at attempt 1", "3 at attempt 2", "4 at attempt 1", "1 restart"]
    assert said[5:] == ["Counter-1 died, which makes 3 deaths within 60 s: its policy allows 2 restarts"]


def test_a_sort_in_parts_loses_nothing_and_passes_the_controller_by() -> None:
    output = run_example("sort.py", "--mib", "16", "--parts", "8")
    assert "sorted: True\nnothing is lost: True\nthe controller: 0 payload bytes\n" in output


@pytest.mark.timeout(120)
def test_agents_work_together_with_no_one_in_charge() -> None:
    output = run_example("agents_p2p.py")
    assert "2000 workflows, each once: True" in output
    assert "draft 7 < needs a source < found one < good < published" in output
    # One call for each agent, and the runtime's own messages.
    sent = re.search(r"the controller sent (\d+) messages", output)
    assert sent is not None
    assert int(sent[1]) < 50
    assert "500 sums in four orders are right at each agent: True" in output
    assert "the product of the grid is that of torch: True" in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [(), ("--mode", "compiled")], ids=["eager", "compiled"])
def test_two_models_equal_one_and_nothing_passes_the_controller(options: tuple[str, ...], tmp_path: Path) -> None:
    picture = tmp_path / "graph.mmd"
    output = run_example("two_models.py", *options, *(["--draw", str(picture)] if options else []))
    assert "the controller: 0 payload bytes" in output
    assert "are equal, bit for bit" in output
    # Less than one activation or gradient, of which each has more than 64 KiB.
    sent = re.search(r"(\d+) bytes of messages a step", output)
    assert sent is not None
    assert int(sent[1]) < 64 * 1024
    assert "ValueError: Expected input batch_size" in output
    assert "needed by Front.backward of Front-1, which did not run" in output
    assert ("a step of a graph, captured at" in output) == (options != ())
    if options:
        assert picture.read_text().count("float32[") >= 2
    # The callee's frames of the runtime are left out.
    assert "hosted_actor.py" not in output


@pytest.mark.timeout(120)
def test_two_models_on_one_device_write_what_one_process_writes() -> None:
    output = run_example("one_gpu.py", "--tokens", "12")
    assert all(re.search(rf"{what} processe?s?: +[\d,]+ tokens/s", output) for what in ("one", "two"))
    assert re.search(r"both models on: \w", output)
    assert re.search(r"are equal, bit for bit; [1-9]\d+ different tokens", output)


@pytest.mark.timeout(180)
def test_send_and_recv_equal_calls_and_the_comparison_says_what_each_takes() -> None:
    output = run_example("two_models_compared.py", "--steps", "3")
    assert re.search(r"(?m)^3 losses and outputs \(\d+, \d+, 256\) are equal, bit for bit$", output)
    numbers = {
        name: (int(left), int(right)) for name, left, right in re.findall(r"(?m)^(\w.+?) {2,}(\d+) +(\d+)$", output)
    }
    by_hand, by_calls = numbers["lines of code beside the model"]
    assert 0 < by_calls < by_hand
    by_hand, by_calls = numbers["bytes of tensors between the halves"]
    assert by_hand == by_calls
    # A header of seven numbers for each tensor and for the error.
    by_hand, _ = numbers["all other bytes sent"]
    assert by_hand > 7 * 8 * (2 * 3 + 3)
    failures = re.findall(r"(?m)^(\w.+?)  +(\w.+?)  +(right|ValueError.+|\d of 3.+)$", output)
    assert [(by_gloo, by_members) for _, by_gloo, by_members in failures] == [
        ("wrong numbers: (201.0, 102.0)", "right"),
        ("a process aborts", "ValueError at 2 of 2 ranks"),
        ("stuck until the timeout", "right"),
        ("stuck until the timeout", "right"),
        ("a process aborts", "right"),
        ("1 of 3 succeed", "2 of 3 succeed"),
        ("stuck until the timeout", "right"),
    ]
    _, by_hand_told, by_calls_told = re.split(r"\ntorch.distributed, gloo\n|\naiodaft\n", output)
    assert by_hand_told.startswith("rank 1 failed:\nValueError: Expected input batch_size")
    assert "needed by Front.backward of Front-1, which did not run" in by_calls_told


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options",
    [
        ("zbv", "2", "4", "--compiled", "--dp", "2", "--skip", "1:0", "2:3"),
        ("zb_h1", "2", "4"),
        *(
            pytest.param((name, ranks, "4"), marks=pytest.mark.soak)
            for name in ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zbv")
            for ranks in ("2", "4")
            if (name, ranks) != ("zb_h1", "2")
        ),
    ],
    ids="-".join,
)
def test_a_pipeline_computes_what_one_process_computes(options: tuple[str, ...], tmp_path: Path) -> None:
    schedule, ranks, microbatches, *flags = options
    picture = tmp_path / "graph.mmd"
    if "--compiled" in flags:
        flags += ["--draw", str(picture)]
    output = run_example(
        "pipeline_gpt.py", "--schedule", schedule, "--ranks", ranks, "--microbatches", microbatches, *flags
    )
    assert "equal those of one process, bit for bit" in output
    if "--compiled" in flags:
        assert "Rank.weights" in picture.read_text()


@pytest.mark.timeout(120)
def test_a_module_a_job_a_program_and_an_engine_crash_and_come_back() -> None:
    said = [line for line in run_example("frameworks.py").splitlines() if not line.startswith(("(", "Trainer-1"))]
    assert said.count("3 * 2 + 1 = 7.000; 6 * 7 = 42; hello") == 2
    told = "\n".join(said)
    assert "the module: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 1x1)" in told
    assert re.search(r"the program: ActorDied: Calculator-1 .*\n    the program ended with status -9", told)
    assert re.search(r"the engine: ActorDied: Engine-1 .*\n    the engine does not answer|ended with status -9", told)
    # Each rank says which one was killed; one for which gloo missed that has ended, and says so with its last line.
    assert (
        len(re.findall(r"(the job: ActorDied|a member was lost): Trainer-1\[1\] .* was killed by SIGKILL", told)) == 4
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "options",
    [
        (),
        *(
            pytest.param(options, marks=pytest.mark.soak)
            for options in (
                ("--by-layer",),
                ("--together",),
                ("--prefill", "0"),
                ("--prefill", "3", "--decode", "1", "--pages", "40"),
                ("--model", "LlamaForCausalLM"),
            )
        ),
    ],
    ids=" ".join,
)
def test_prompts_of_a_server_are_completed_as_by_one_process_while_an_engine_dies(options: tuple[str, ...]) -> None:
    output = run_example("serve_disagg.py", "--steps", "100", *options)
    assert "64 completions are those of one process, and no engine has anything of them any more" in output
    assert re.search(r"resumed after the kill  [1-9]", output)
    moved = re.search(r"keys and values +(\d+) messages, (\d+) bytes", output)
    assert moved is not None
    assert (int(moved[1]) > 0) == (int(moved[2]) > 0) == (not {"--together", "0"} & set(options))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--encode", "3", "--prefill", "1", "--decode", "1"), marks=pytest.mark.soak)],
    ids=" ".join,
)
def test_three_pools_caption_images_as_one_process_while_one_of_each_dies(options: tuple[str, ...]) -> None:
    output = run_example("serve_images.py", "--steps", "40", *options)
    assert re.search(r"64 captions are those of one process; \d+ a second, with a kill in each pool", output)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["zero3", "tp", "pp", "3d"])
def test_a_model_for_one_device_trains_under_a_strategy(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    written, picture = tmp_path / "mine.json", tmp_path / "plan.svg"
    files = ["--write", str(written), "--draw", str(picture)]
    output = run_example("train_gpt.py", "--strategy", strategy, "--steps", "4", *files)
    assert "bytes done = planned: True" in output
    assert float(output.rpartition("at most ")[2]) < 1e-5
    assert "blocks.1.down" in picture.read_text()
    assert written.read_text().startswith("{")


@pytest.mark.timeout(120)
def test_one_state_has_four_placements() -> None:
    pytest.importorskip("torch")
    output = run_example("reshard_lab.py", "--steps", "3", "--tokens", "3")
    found = re.search(r"differ by at most (\S+), the tokens are equal: True", output)
    assert found, output
    assert float(found[1]) < 1e-5


@pytest.mark.timeout(180)
def test_training_by_fsdp_and_tensor_parallelism_goes_on_after_a_death() -> None:
    output = run_example("fsdp_tp.py")
    losses = [float(one) for line in re.findall(r"loss (\S+) -> (\S+),", output) for one in line]
    assert len(losses) == 6
    assert losses[-1] < 0.1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options", [("long_context.py", "--ranks", "3", "--length", "50"), ("moe.py", "--ranks", "3")], ids="-".join
)
def test_a_ring_and_experts_train_as_one_process(options: tuple[str, ...]) -> None:
    output = run_example(*options)
    apart = [float(one) for one in re.findall(r"off by (\S+)", output)]
    assert len(apart) == 5
    assert max(apart) < 1e-5
    assert options[0] != "moe.py" or "experts by rank: [2, 2, 1]" in output


def test_trials_that_do_not_look_good_end_early() -> None:
    pytest.importorskip("optuna")
    output = run_example("search.py", "--trials", "24")
    found = re.match(r"24 trials by 2 workers, (\d+) ended early: (\d+) epochs instead of 2400\n", output)
    assert found is not None, output
    assert int(found[1]) > 0
    assert int(found[2]) < 2400


def test_each_page_is_fetched_once_and_missing_ones_hold_up_none() -> None:
    assert re.match(r"101 pages by 2 fetchers in .* s, 1 of them missing\n", run_example("crawl.py", "--pages", "100"))


def test_a_farm_of_loaders_gives_a_trainer_each_picture_once() -> None:
    output = run_example("data_farm.py", "--batches", "9", "--batch", "4")
    assert "each of 32 pictures was seen once: True\nthe controller: 0 payload bytes\n" in output
