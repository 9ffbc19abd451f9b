"""The answers of commands: text or one JSON document on standard output, errors on standard error."""

from __future__ import annotations

import json
from typing import IO, Any, Final

import click

# The exit status of a command that failed; wrong usage has 2.
FAILED: Final = 1

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


class Failed(click.ClickException):
    """A command failed: its message goes to standard error, and the exit status is 1."""

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
