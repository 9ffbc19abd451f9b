"""Options and arguments that several commands have."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import click

address_argument: Final = click.argument("address", required=False)
key_file_option: Final = click.option(
    "--key-file", type=click.Path(), help="The key of the cluster.  [default: $AIODAFT_KEY_FILE, ~/.config/aiodaft/key]"
)


def seconds(least: float = 0) -> Callable[[str], float]:
    """The type of an option that is a number of seconds."""

    def convert(text: str) -> float:
        with suppress(ValueError):
            if (number := float(text)) >= least and math.isfinite(number):
                return number
        raise click.BadParameter(f"{text!r} is not a number of seconds of at least {least:g}")

    return convert
