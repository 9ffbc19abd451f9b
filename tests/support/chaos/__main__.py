"""Entry point of `python tests/support/chaos`."""

from __future__ import annotations

import sys
from pathlib import Path

# Workers, too, import the actors by the name of the package.
sys.path[0] = str(Path(__file__).parent.parent)

from chaos.command import main  # noqa: E402 - found by the line above

if __name__ == "__main__":
    main(sys.argv[1:])
