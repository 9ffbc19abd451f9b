"""examples/tour.ipynb in a live kernel: each cell runs, and gives the result that its text names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")
pytest.importorskip("tqdm")

from notebook import open_notebook

# A kernel and its actors load torch.
pytestmark = [pytest.mark.programs, pytest.mark.timeout(120)]

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"

# The results of cells, by their ids: their last expression, their output, and their HTML.
RESULTS = {
    "actor": r"15",
    "ref": r"32",
    "chain": r"<Ref of Layer.forward, done>",
    "value": r"\(torch.Size\(\[1048576\]\), 6.0, 4\)",
    "group": r"\[tensor\(\[10., 10., 10.\]\), tensor\(\[10., 10., 10.\]\)\]",
    "map": r"3800.0",
    "stream": r"\['line 0', 'line 1', 'line 2'\]",
    "restart": r".*ActorDied\(.*",
    "graph": r"<Graph of 2 calls.*>",
    "run": r"tensor\(\[ 6., 12.\]\)",
    "overview": r"<Overview of controller-.*, 2 failures>",
}
PRINTED = {
    "map": r"100%.* 20/20",
    "failure": r"unsupported operand.*\nraised by Counter.add in Counter-1 .*\nneeded by Counter.add",
    "restart": r"1 after 1 restart",
}
SHOWN = {
    "chain": "float32[1048576]",
    "graph": "<strong>Graph of 2 calls",
    "restart": "<li>ActorDied: ",
    "overview": "unsupported operand",
}


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TOUR.read_text())["cells"]
    return found


def test_the_file_changes_only_with_its_cells() -> None:
    text = TOUR.read_text()
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert all((cell["execution_count"], cell["outputs"]) == (None, []) for cell in cells() if "outputs" in cell)
    ids = [cell["id"] for cell in cells()]
    assert len(set(ids)) == len(ids)
    assert RESULTS.keys() | PRINTED.keys() | SHOWN.keys() <= set(ids)


# The loop that counts is the kernel's.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_every_cell_gives_what_its_text_says(nothing_left_behind: None, tmp_path: Path) -> None:
    async with open_notebook(f"import os\nos.chdir({str(tmp_path)!r})") as notebook:
        for cell in cells():
            if cell["cell_type"] != "code":
                continue
            name, output = cell["id"], await notebook.run("".join(cell["source"]))
            assert output.error is None, f"{name}: {output.traceback}"
            assert re.fullmatch(RESULTS.get(name, "None"), str(output.result), re.DOTALL), (name, output.result)
            assert re.search(PRINTED.get(name, ""), output.printed), (name, output.printed)
            assert SHOWN.get(name, "") in (output.html or ""), (name, output.html)
        assert json.loads((tmp_path / "tour.json").read_text())["traceEvents"]
        assert notebook.processes() == set()
