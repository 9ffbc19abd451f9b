"""Loops that tasks run inside of tasks, as libraries with synchronous interfaces do in notebooks (nest_asyncio2)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"

SCRIPT = """
    import asyncio, sys
    sys.path.insert(0, {support!r})
    import nest_asyncio2
    import aiodaft
    from actors import Echo

    async def main():
        loop = asyncio.get_running_loop()
        nest_asyncio2.apply(loop)
        async with aiodaft.Runtime(preload=()) as rt:
            echo = await rt.spawn(Echo)
            async with aiodaft.compile(lambda x: echo.echo(x)) as graph:
                call = graph if {graph} else echo.echo

                async def value(x):
                    return await call(x)

                for number in range(20):
                    second = loop.create_task(value(-number))
                    third = value("nested")
                    print(await value(number), loop.run_until_complete(second), loop.run_until_complete(third))

    asyncio.run(main())
"""


@pytest.mark.parametrize("graph", [False, True])
def test_refs_are_awaited_in_loops_inside_of_loops(graph: bool) -> None:
    code = textwrap.dedent(SCRIPT).format(support=str(SUPPORT), graph=graph)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{number} {-number} nested" for number in range(20)]
