"""Runs the python blocks of a page, one after the other, in one namespace: `python run_blocks.py PAGE`.

A block may use `await` at its top level, as in a notebook.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from pathlib import Path

from aiodaft import Runtime as _Runtime

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    page = Path(sys.argv[1])
    text, defaults = page.read_text(), _Runtime.__init__.__kwdefaults__
    with asyncio.Runner() as runner:
        for block in BLOCK.finditer(text):
            # Errors name the lines of the page.
            source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
            # Once a block has imported torch, runtimes would preload it for all others: a second each time.
            defaults["preload"] = None if "torch" in block[1] else ()
            code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            result = eval(code, globals())
            if inspect.iscoroutine(result):
                runner.run(result)


if __name__ == "__main__":
    main()
