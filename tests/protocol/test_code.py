"""The allowed contents of an archive of code."""

from __future__ import annotations

import pytest

from aiodaft._protocol.node.worker import MAX_BYTES, MAX_FILES, File, check_files


def test_modules_in_packages_are_taken() -> None:
    check_files([File("a.py", False, b""), File("b/c/..d.py", True, b"x" * 10), File("wörter.py", False, b"")])


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../a.py", "a/../../b.py", "a/..", "./a.py", "a//b.py", "a/", "..", ".", "a\0.py"]
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="does not lie in the folder of the archive"):
        check_files([File("a.py", False, b""), File(path, False, b"")])


def test_too_much_is_refused() -> None:
    content = bytes(MAX_BYTES // 2)
    check_files([File("a", False, content), File("b", False, content)])
    with pytest.raises(ValueError, match="at most 10,000 files and 67,108,864 bytes"):
        check_files([File("a", False, content), File("b", False, content), File("c", False, b"x")])
    with pytest.raises(ValueError, match="at most 10,000 files"):
        check_files([File(f"{number}", False, b"") for number in range(MAX_FILES + 1)])
