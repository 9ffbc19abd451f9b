"""The page of the dashboard in a browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import BINARY, Page
from dashboard_program import HOSTILE

PROGRAM = Path(__file__).parents[1] / "support" / "dashboard_program.py"

pytestmark = [
    pytest.mark.programs,
    pytest.mark.timeout(180),
    pytest.mark.skipif(BINARY is None, reason="chromium is not installed"),
]


@pytest.fixture
def program(nothing_left_behind: None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program with a dashboard, and its address."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the program has ended"
        try:
            yield process, address
        finally:
            process.communicate(timeout=50)


@pytest.fixture
def page(program: tuple[subprocess.Popen[str], str], tmp_path: Path) -> Iterator[Page]:
    with Page(tmp_path) as page:
        page.resize(1440)
        page.open(program[1])
        yield page


WIDTH_OF_A_CHART = "Number(document.querySelector('#calls svg').getAttribute('width'))"
# The distances of each box of the flow from the four edges of the drawing.
BOXES = """
    [...document.querySelectorAll('#flow rect')].map((one) => {
        const [box, all] = [one, one.ownerSVGElement].map((element) => element.getBoundingClientRect());
        return [box.left - all.left, box.top - all.top, all.right - box.right, all.bottom - box.bottom];
    })
"""


def filter_actors(page: Page, wanted: str) -> None:
    field = "document.querySelector('#actors-filter')"
    page.run(f"{field}.value = {wanted!r}, {field}.dispatchEvent(new Event('input'))")


def test_the_page_shows_what_the_program_does(page: Page, program: tuple[subprocess.Popen[str], str]) -> None:
    # The actors that need attention are first.
    page.wait("document.querySelector('#actors tbody tr .state')?.dataset.state === 'silent'")
    assert len(page.texts("#actors tbody tr")) == 4
    assert "silent for" in " ".join(page.texts("#processes tbody tr"))
    assert any("as the-source" in row for row in page.texts("#actors tbody tr"))
    page.wait("document.querySelectorAll('#flow .edge:not(.idle)').length >= 3")
    page.wait("[...document.querySelectorAll('#flow .labels text')].some((one) => one.textContent.endsWith('MB/s'))")
    page.wait("document.querySelectorAll('#flow .box').length === 5")
    page.wait("document.querySelector('#calls .line').getAttribute('d')?.includes('L')")
    assert "Source.make" in page.texts("#memory .value b")
    failures = page.texts("#failures article")
    assert any(
        "ValueError: bad" in one and "Middle.wrap of Middle-1 raised RuntimeError: no way" in one for one in failures
    )

    # Texts of the program are texts.
    assert any(one.startswith("ValueError: <img src=x onerror=") for one in failures)
    assert page.run("window.hacked === undefined && !document.querySelector('main img, main script')")

    assert any(HOSTILE in line for line in page.texts("#logs .line"))

    filter_actors(page, "middle")
    assert [row.split()[1] for row in page.texts("#actors tbody tr")] == ["Middle-1"]
    filter_actors(page, "")
    page.click("#actors th:nth-child(6) button")
    done = [int(cell.replace(",", "")) for cell in page.texts("#actors tbody td:nth-child(6)")]
    assert done == sorted(done, reverse=True)

    page.click("#pause")
    assert page.texts("#status") == ["paused"]
    page.click("#pause")
    page.wait("document.querySelector('#status').textContent === 'live'")
    program[0].communicate(timeout=50)
    page.wait("document.querySelector('#status').textContent === 'ended'")
    assert "The runtime is closed" in page.texts("#notice")[0]

    # Nothing went wrong, and nothing was loaded from anywhere else.
    assert page.problems == []
    urls = page.requests
    assert len(urls) > 8
    assert [url for url in urls if not url.startswith(program[1])] == []


def test_the_page_fits_small_and_large_windows_light_and_dark(page: Page) -> None:
    page.wait("document.querySelectorAll('#flow .box').length === 5")
    colors = set()
    for width in (380, 800, 1440, 2560):
        for theme in ("light", "dark"):
            page.resize(width, theme=theme)
            page.wait(f"{WIDTH_OF_A_CHART} === document.querySelector('#calls').clientWidth")
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            # No box of the flow hides another one, and none sticks out.
            boxes = page.run(BOXES)
            assert min(min(box) for box in boxes) >= 0
            assert len({(box[0], box[1]) for box in boxes}) == len(boxes)
            colors.add((theme, page.run("getComputedStyle(document.body).backgroundColor")))
    assert len(colors) == 2
    # The user's choice is kept.
    page.click("#theme")
    page.click("#theme")
    page.ask("Page.reload")
    page.wait("document.querySelectorAll('#flow .box').length === 5")
    assert page.texts("#theme") == ["Theme: dark"]
    assert page.problems == []
