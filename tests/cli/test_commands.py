"""The common part of all commands of `aiodaft`: help, JSON, errors, exit statuses, completion."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result

from aiodaft.cli.__main__ import main


def ran(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"AIODAFT_ADDRESS": "", **environment})


def commands() -> dict[str, click.Command]:
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def completed(words: str) -> list[str]:
    """The completions that bash gets for a user's words."""
    arguments, _, incomplete = words.rpartition(" ")
    shell = BashComplete(main, {}, "aiodaft", "_AIODAFT_COMPLETE")
    return [item.value for item in shell.get_completions(arguments.split(), incomplete)]


def test_every_command_has_a_line_of_help_that_fits() -> None:
    shown = ran("--help").stdout
    for name, command in commands().items():
        assert command.help is not None
        assert command.name == name
        line = command.help.splitlines()[0]
        assert [row.split(maxsplit=1) for row in shown.splitlines() if row.startswith(f"  {name} ")] == [[name, line]]


def test_every_command_that_answers_has_json() -> None:
    # The first two hand over the terminal, the third prints code for a shell.
    without = {"run", "debug", "completion"}
    found = {name: getattr(command, "commands", {name: command}).values() for name, command in commands().items()}
    has = {name for name, those in found.items() if all("--json" in one.get_help(click.Context(one)) for one in those)}
    assert has == set(found) - without


def test_a_node_says_in_one_line_of_json_where_it_listens(tmp_path: Path) -> None:
    key = str(tmp_path / "key")
    made = json.loads(ran("key", "new", key, "--json").stdout)
    command = ["up", "--listen", "tcp://127.0.0.1:0", "--name", "n1", "--key-file", key, "--json"]
    with subprocess.Popen([sys.executable, "-m", "aiodaft.cli", *command], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        said = json.loads(node.stdout.readline())
        node.terminate()
        assert (node.wait(20), node.stdout.read()) == (0, "")
    assert said.pop("address").startswith("tcp://127.0.0.1:")
    assert said == {"node": "n1", "pid": node.pid, "cluster": made["cluster"]}


def test_a_new_project_is_told_as_a_document(tmp_path: Path) -> None:
    document = json.loads(ran("new", str(tmp_path / "words"), "--web", "--json").stdout)
    assert (document["path"], document["kind"]) == (str(tmp_path / "words"), "web")
    assert all((tmp_path / "words" / name).is_file() for name in document["files"])


def test_the_errors_of_a_command_are_on_standard_error_and_its_status_is_1() -> None:
    for arguments in (("down",), ("stop", "one"), ("drain", "n1", "--json")):
        ended = ran(*arguments)
        assert (ended.exit_code, ended.stdout) == (1, "")
        assert ended.stderr == "aiodaft: say where a node of the cluster listens, such as tcp://10.0.0.1:7777\n"
    ended = ran("stack", "--pid", "1")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "there is no aiodaft program with actors in process 1" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("join",), "Missing argument 'ADDRESS'"),
        (("top", "tcp://10.0.0.1:7777", "--pid", "1"), "ADDRESS and --pid exclude each other"),
        (("drain", "n1", "--grace", "soon"), "'soon' is not a number of seconds of at least 0"),
        (("up", "--key-file", "key", "--key-stdin"), "--key-file and --key-stdin exclude each other"),
        (("run", "--cpus", "two", "script.py"), "'two' is not a valid float"),
    ],
)
def test_wrong_usage_has_status_2(arguments: tuple[str, ...], said: str) -> None:
    ended = ran(*arguments)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert said in ended.stderr


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell runs it, `aiodaft` among its words."""
    command = command.replace("aiodaft", f"{shlex.quote(sys.executable)} -m aiodaft.cli", 1)
    env = {**os.environ, "AIODAFT_ADDRESS": "", **environment}
    return subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=False)


def test_commands_run_without_standard_streams() -> None:
    ended = shell("aiodaft stack --pid 1 <&- >&-")
    assert ended.returncode == 1
    assert "there is no aiodaft program with actors in process 1" in ended.stderr


def test_a_full_disk_is_an_error_without_a_traceback() -> None:
    ended = shell("aiodaft doctor --help > /dev/full")
    assert (ended.returncode, ended.stderr) == (1, "aiodaft: [Errno 28] No space left on device\n")


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    ended = shell(f"aiodaft new {tmp_path}/☃/project", PYTHONIOENCODING="latin-1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"made {tmp_path}/\\u2603/project with ")


def test_join_names_the_host_that_is_not_known(tmp_path: Path) -> None:
    ran("key", "new", str(tmp_path / "key"))
    ended = ran("join", "tcp://no.such.host.invalid:7777", "--key-file", str(tmp_path / "key"))
    assert ended.exit_code == 1
    assert "tcp://no.such.host.invalid:7777 cannot be joined: [Errno " in ended.stderr


def test_a_key_is_made_with_one_document_on_standard_output(tmp_path: Path) -> None:
    ended = ran("key", "new", str(tmp_path / "key"), "--json")
    document = json.loads(ended.stdout)
    assert (ended.exit_code, document["path"]) == (0, str(tmp_path / "key"))
    assert len(document["cluster"]) == 12


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str) -> None:
    ended = ran("completion", shell)
    assert ended.exit_code == 0
    assert f"_AIODAFT_COMPLETE={shell}_complete" in ended.stdout


def test_commands_and_options_are_completed() -> None:
    assert completed("do") == ["doctor", "down"]
    assert completed("drain --g") == ["--grace"]
    assert completed("completion z") == ["zsh"]
    # No program is asked that there is not.
    assert completed("kill --pid none M") == []


def test_the_installed_command_answers_a_shell() -> None:
    environment = {**os.environ, "_AIODAFT_COMPLETE": "bash_complete", "COMP_WORDS": "aiodaft jo", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['aiodaft']; from aiodaft.cli.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50)
    assert ended.stdout == "plain,join\n"


def test_a_node_loads_nothing_that_draws() -> None:
    code = "import sys, aiodaft.cli.__main__, aiodaft.cli.node; print('click' in sys.modules, 'rich' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.stdout == "True False\n"
