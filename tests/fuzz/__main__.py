"""`python tests/fuzz TARGET SECONDS`: looks for bytes that break a rule. Needs `pip install atheris`.

Inputs that reach new code are kept beside this file. A fault ends the command with the input that shows it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

# An input that takes 5 s or 512 MiB is a fault, too.
_LIMITS = [
    "-timeout=5",
    "-rss_limit_mb=512",
    "-max_len=2048",
    "-print_final_stats=1",
    f"-artifact_prefix={tempfile.gettempdir()}/",
]
# Inputs that are kept of one target.
_MOST = 250


def main(target: str, seconds: int) -> int:
    from fuzz_targets import corpus_of, kept

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(kept(target) if corpus_of(target).exists() else []):
            Path(folder, str(number)).write_bytes(data)
        # It ends its process.
        command = [sys.executable, __file__, "--inside", target, folder, f"-max_total_time={seconds}", *_LIMITS]
        ended = subprocess.run(command, check=False).returncode
        found = sorted((path.read_bytes() for path in Path(folder).iterdir()), key=lambda data: (len(data), data))
    if ended:
        return ended
    corpus_of(target).write_text("".join(f"{data.hex()}\n" for data in found[:_MOST]), encoding="ascii")
    return 0


def fuzz(target: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["aiodaft", "aiodaft_transport"]):
        import fuzz_targets
    atheris.Setup([sys.argv[0], *arguments], fuzz_targets.TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
