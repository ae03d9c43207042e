"""A real browser for tests, over the DevTools protocol by pipe: what a page looks like there, and what its scripts find."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # which a container's root can't have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_ANSWER_SECONDS = 30.0


def find_browser() -> str | None:
    """The path of a Chromium or Chrome; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process with one page. To be used by ``with``: afterwards no process and no folder is left.

    Commands go through file descriptors 3 and 4, as JSON that ends with a zero byte (``--remote-debugging-pipe``), so that no port is
    open and no websocket is needed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._unread = b""

    def __enter__(self) -> Browser:
        self.folder = tempfile.mkdtemp(prefix="autopar-browser-")
        theirs_in, self._write = _high_pipe()
        self._read, theirs_out = _high_pipe()
        null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)
        pipes = (os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)
        arguments = [self._path, *_OPTIONS, f"--user-data-dir={self.folder}", "about:blank"]
        environment = {**os.environ, "HOME": self.folder, "XDG_CONFIG_HOME": self.folder, "XDG_CACHE_HOME": self.folder}
        self.pid = os.posix_spawn(self._path, arguments, environment, file_actions=[*pipes, *null], setsid=True)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        try:
            targets = self.ask("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._write)
        os.close(self._read)
        # Its children may still be writing for a moment.
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result.

        Raises:
            RuntimeError: with what the browser says is wrong, or if it doesn't answer.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next(method)).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer.get("result", {}))

    def _next(self, method: str) -> dict[str, Any]:
        ends = time.monotonic() + _ANSWER_SECONDS
        while b"\0" not in self._unread:
            if not select.select([self._read], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise RuntimeError(f"the browser didn't answer {method} within {_ANSWER_SECONDS:.0f} s")
            if not (found := os.read(self._read, 1 << 20)):
                raise RuntimeError(f"the browser ended at {method}")
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(line))

    def show(self, page: Path, *, width: int, height: int = 800, dark: bool = False, media: str = "") -> list[str]:
        """Load a page at a width, in a theme; returns what went wrong: errors of scripts, and what was loaded besides the page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._events.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next("Page.loadEventFired"))
        self.run("document.fonts.ready.then(() => 0)")
        return [wrong for event in self._events if (wrong := _wrong(event, page.resolve().as_uri()))]

    def run(self, script: str) -> Any:
        """The value of an expression, or of what it promises.

        Raises:
            RuntimeError: if it fails.
        """
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"])


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the descriptors that the browser wants, so that putting them there overwrites neither."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def _wrong(event: Mapping[str, Any], address: str) -> str | None:
    """What an event says is wrong, in words."""
    method, told = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        return f"exception: {told['exceptionDetails'].get('text')}"
    if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
        return f"log: {told['entry']['text']}"
    if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
        return f"console: {told['args']}"
    if method == "Network.requestWillBeSent" and told["request"]["url"] != address:
        return f"request: {told['request']['url'][:200]}"
    return None
