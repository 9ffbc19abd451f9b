"""`aiodaft bench`: the same as `python -m aiodaft.bench`."""

from __future__ import annotations

import click

from aiodaft.bench.__main__ import main


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure aiodaft on this machine."""
    main(arguments, program="aiodaft bench")
