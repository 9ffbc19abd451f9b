"""`aiodaft new`: makes a starter project, with tests that pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from .options import Failed, Output, json_option

_TEMPLATES: Final = Path(__file__).parent / "templates"
# A name that a Python project may have.
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# The placeholder of the project's name in the templates.
_PLACEHOLDER: Final = "PROJECT"
# The command that starts the program of each kind.
_STARTS: Final = {
    "script": "python main.py README.md",
    "web": "uvicorn app:app",
    "notebook": "jupyter notebook notebook.ipynb",
}


@click.command()
@click.argument("path", metavar="NAME", type=click.Path(path_type=Path))
@click.option("--script", "kind", flag_value="script", default="script", help="A program.  [default]")
@click.option("--web", "kind", flag_value="web", help="A server with FastAPI.")
@click.option("--notebook", "kind", flag_value="notebook", help="A notebook.")
@json_option
def new(path: Path, kind: str, as_json: bool) -> None:
    """Make a folder with a small project and its tests, to begin with."""
    made = make_project(path, kind)
    output = Output(as_json=as_json)
    output.document = {"path": str(path.resolve()), "kind": kind, "files": made, "start": _STARTS[kind]}
    output.line(f"made {path} with {', '.join(made)}\nnext:\n  cd {path}")
    output.line("  python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[test]'")
    output.line(f"  pytest\n  {_STARTS[kind]}")
    output.end()


def make_project(path: Path, kind: str) -> list[str]:
    """Make a project of a kind; returns its files.

    Raises:
        Failed: The folder has something in it, or cannot be made, or no project can have its name.
    """
    name = path.resolve().name
    if _NAME.fullmatch(name) is None:
        raise Failed(f"{name!r} cannot be the name of a project: letters, digits, and - _ . between them are allowed")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise Failed(f"{path} is there already: nothing was changed")
        return sorted(_copy(source, path, name) for source in _files(kind))
    except OSError as error:
        raise Failed(f"{path} cannot be made: {error.strerror}") from error


def _files(kind: str) -> list[Path]:
    folders = _TEMPLATES / "common", _TEMPLATES / kind
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def _copy(source: Path, target: Path, name: str) -> str:
    inside = Path(*source.relative_to(_TEMPLATES).parts[1:])
    (target / inside).parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8").replace(_PLACEHOLDER, name)
    (target / inside).write_text(text, encoding="utf-8")
    return str(inside)
