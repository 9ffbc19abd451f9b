"""Chromium without a window, driven over a pipe by the DevTools protocol: https://chromedevtools.github.io/devtools-protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

BINARY: Final = shutil.which("chromium")
_OPTIONS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-crash-reporter",
    "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One page in a browser of its own, with nothing that another one has left. All methods block."""

    def __init__(self, folder: Path) -> None:
        assert BINARY is not None
        to_browser, self._to_browser = os.pipe()
        self._from_browser, from_browser = os.pipe()
        # Chromium reads orders from descriptor 3, and writes to 4.
        script = f'exec "$0" "$@" 3</dev/fd/{to_browser} 4>/dev/fd/{from_browser}'
        command = ["sh", "-c", script, BINARY, *_OPTIONS, f"--user-data-dir={folder}"]
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), **silent)
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = count(1)
        self._rest = b""
        self._session: dict[str, str] = {}
        # The events that the browser has reported by itself.
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = {}
        try:
            self.ask("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to_browser)
            os.close(self._from_browser)

    def ask(self, method: str, **parameters: Any) -> Any:
        """Give an order, and wait for its result."""
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to_browser, json.dumps(order).encode() + b"\0")
        while (message := self._next()).get("id") != number:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from_browser, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression, or of its promise."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        self.run(
            "new Promise((done) => {"
            f"const look = () => (({condition}) ? done() : requestAnimationFrame(look)); look(); }})"
        )

    def texts(self, selector: str) -> list[str]:
        """The texts that users read in some elements."""
        found: list[str] = self.run(f"[...document.querySelectorAll({selector!r})].map((one) => one.innerText)")
        return found

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({selector!r}).click()")

    def resize(self, width: int, height: int = 900, theme: str = "light") -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.wait(f"innerWidth === {width}")

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Errors and warnings on the console."""
        told = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [event for event in self.events if event["method"] in told]

    @property
    def requests(self) -> list[str]:
        """The addresses of all that was loaded."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
