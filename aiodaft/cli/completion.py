"""`aiodaft completion SHELL`: has a shell complete commands, options and names."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

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
