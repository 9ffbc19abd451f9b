"""Runs the notebook from its first cell to its last, in a kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebook.ipynb"


def test_every_cell_of_the_notebook_runs() -> None:
    notebook = nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)
    # An error in a cell is raised.
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
