"""The options that several commands have, and the answers: text or one JSON document, and errors on standard error."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import IO, Any, Final

import click
from click.shell_completion import get_completion_class

from aiodaft.program import run

FAILED: Final = 1

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


class Failed(click.ClickException):
    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{click.style('aiodaft:', 'red')} {self.format_message()}", file=file, err=True)


def escaped(value: Any) -> Any:
    """Values of JSON without the characters that a terminal would obey, but the ends of lines."""
    match value:
        case str() if not value.isprintable():
            return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)
        case list():
            return [*map(escaped, value)]
        case dict():
            return {escaped(key): escaped(one) for key, one in value.items()}
        case _:
            return value


class Output:
    """The output of a command: lines that are printed as they come, or a document that is printed at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self.document: dict[str, Any] = {}

    def line(self, text: str) -> None:
        if not self._as_json:
            click.echo(text)

    def end(self) -> None:
        if self._as_json:
            print_json(self.document)


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2))


# Seconds for which a user who completes a name waits at the most.
_PATIENCE_OF_SHELL: Final = 1.0

address_argument: Final = click.argument("address", required=False)
key_file_option: Final = click.option(
    "--key-file", type=click.Path(), help="The key of the cluster.  [default: $AIODAFT_KEY_FILE, ~/.config/aiodaft/key]"
)


def seconds(least: float = 0) -> Callable[[str], float]:
    def convert(text: str) -> float:
        with suppress(ValueError):
            if (number := float(text)) >= least and math.isfinite(number):
                return number
        raise click.BadParameter(f"{text!r} is not a number of seconds of at least {least:g}")

    convert.__name__ = "seconds"
    return convert


def completing(
    names: Callable[[click.Context], Awaitable[Iterable[str]]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    async def soon(context: click.Context) -> Iterable[str]:
        async with asyncio.timeout(_PATIENCE_OF_SHELL):
            return await names(context)

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        with suppress(click.ClickException, TimeoutError):
            return [name for name in run(soon(context)) if name.startswith(incomplete)]
        return []

    return complete


_PROGRAM: Final = "aiodaft"
_VARIABLE: Final = "_AIODAFT_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the code with which a shell completes commands.

    \b
    bash: eval "$(aiodaft completion bash)"             in ~/.bashrc
    zsh:  eval "$(aiodaft completion zsh)"              in ~/.zshrc
    fish: aiodaft completion fish | source              in ~/.config/fish/config.fish
    """
    of_shell = get_completion_class(shell)
    assert of_shell is not None
    click.echo(of_shell(context.find_root().command, {}, _PROGRAM, _VARIABLE).source())
