"""`aiodaft new`: makes a starter project, with tests that pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import click

from .options import Failed, Output, json_option

_TEMPLATES: Final = Path(__file__).parent / "templates"
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class _Kind(NamedTuple):
    start: str
    modules: list[str]
    packages: list[str]
    tests: list[str]


_KINDS: Final = {
    "script": _Kind("python main.py README.md", ["main"], [], []),
    "web": _Kind("uvicorn app:app", ["app"], ["fastapi>=0.110", "uvicorn>=0.29"], ["httpx>=0.27"]),
    "notebook": _Kind("jupyter notebook notebook.ipynb", [], ["ipykernel>=6.29", "notebook>=7"], ["nbclient>=0.10"]),
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
    output.document = {"path": str(path.resolve()), "kind": kind, "files": made, "start": _KINDS[kind].start}
    output.line(f"made {path} with {', '.join(made)}\nnext:\n  cd {path}")
    output.line("  python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[test]'")
    output.line(f"  pytest\n  {_KINDS[kind].start}")
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
        words = _placeholders(name, _KINDS[kind])
        return sorted(_copy(source, path, words) for source in _files(kind))
    except OSError as error:
        raise Failed(f"{path} cannot be made: {error.strerror}") from error


def _files(kind: str) -> list[Path]:
    folders = _TEMPLATES / "common", _TEMPLATES / kind
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def _placeholders(name: str, kind: _Kind) -> dict[str, str]:
    def strings(texts: list[str]) -> str:
        return ", ".join(f'"{text}"' for text in texts)

    return {
        "PROJECT": name,
        '"MODULES"': strings(["actors", *kind.modules]),
        '"DEPENDENCIES"': strings(["aiodaft", *kind.packages]),
        '"TESTS"': strings([*kind.tests, "pytest>=8.2", "pytest-asyncio>=1.0"]),
    }


def _copy(source: Path, target: Path, words: Mapping[str, str]) -> str:
    inside = Path(*source.relative_to(_TEMPLATES).parts[1:])
    (target / inside).parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    (target / inside).write_text(text, encoding="utf-8")
    return str(inside)
