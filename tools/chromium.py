"""Chromium without a window, driven over a pipe by the DevTools protocol. It needs nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The path of a Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page in one browser. Use it in a ``with`` block.

    Attributes:
        requested: the addresses that the page has asked for since it was opened.
    """

    def __init__(self, program: str) -> None:
        self.requested: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        # With --remote-debugging-pipe it reads commands from descriptor 3 and writes answers to 4.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def descriptors() -> None:
            # First away from 3 and 4, which the pipes themselves may have.
            reads, writes = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [program, *options, f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=descriptors,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read = b""
        self._last = 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30.0)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def open(self, address: str) -> None:
        """Go to a page and wait until it has loaded. Colors change at once there, without a transition."""
        self._events.clear()
        self.requested.clear()
        self.call("Page.navigate", url=address)
        self._wait("Page.loadEventFired", 30.0)
        self.evaluate("document.head.append(document.createElement('style'))")
        self.evaluate("document.head.lastChild.textContent = '* { transition: none !important; }'")

    def look(self, *, width: int, height: int, scheme: str) -> None:
        """Set the size of the screen in CSS pixels, and whether the reader's system is "light" or "dark"."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, width: int, height: int) -> None:
        """Write the upper part of the page as a PNG file."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True, optimizeForSpeed=True
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    def _wait(self, method: str, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while True:
            events, self._events = self._events, []
            for event in events:
                if event.get("method") == "Network.requestWillBeSent":
                    self.requested.append(event["params"]["request"]["url"])
            if any(event.get("method") == method for event in events):
                return
            self._events.append(self._next(ends - time.monotonic()))

    def _next(self, seconds: float) -> dict[str, Any]:
        """The next message of the browser."""
        ends = time.monotonic() + seconds
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(ends - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"Chromium has not answered for {seconds:.0f} s")
            some = os.read(self._in, 1 << 20)
            if not some:
                raise RuntimeError("Chromium has ended")
            self._read += some
        message, _, self._read = self._read.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded
