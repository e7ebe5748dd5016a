"""A headless Chromium, driven over the DevTools protocol through a pair of pipes.

    caller's thread --command--> pipe 3 --> Chromium --> pipe 4 --> reader thread --> the caller

It uses pipes instead of a socket, so no other program can connect to a port and drive the browser.
When this process ends for any reason, the pipes close and Chromium quits.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sightline.errors import ConfigError, EnvironmentFailed

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    "--mute-audio",
    # No page can reach a host outside this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--proxy-server=direct://",
)
ANSWER_TIMEOUT_S = 60.0


def find_chromium(names: Sequence[str] = NAMES) -> str | None:
    """Return the path of the first of these programs that is installed, or None."""
    return next((path for name in names if (path := shutil.which(name))), None)


def get_chromium(names: Sequence[str] = NAMES) -> str:
    """Return the path of Chromium. Raise ConfigError if it is not installed."""
    if (path := find_chromium(names)) is None:
        raise ConfigError(
            "there is no Chromium on this machine (looked for " + ", ".join(names) + ")",
            "install it (Debian: apt-get install chromium), or choose another environment",
        )
    return path


@dataclass
class Chromium:
    """One browser process. Its methods may be called from many threads."""

    path: str
    _pending: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)
    _waiting: dict[tuple[str, str], Future[dict[str, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last_id: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        profile = tempfile.mkdtemp(prefix="sightline-chromium-")
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's sandbox does not run as root
        # The browser expects its pipes at descriptors 3 and 4, and a shell can place them there.
        # The shell also outlives this process, and then removes the profile.
        place = '"$@" 3<&0 4>&1 0</dev/null 1>/dev/null; rm -rf -- "$0"'
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", place, profile, self.path, *flags, "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def open_tab(self, width: int, height: int) -> Tab:
        """Open a tab in its own context, which shares no cookies or cache with other tabs."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        tab = Tab(self, attached["sessionId"], context)
        tab.call("Page.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", size)
        return tab

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str = ""
    ) -> dict[str, Any]:
        """Send a command and wait for its result."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._last_id += 1
            number = self._last_id
            self._pending[number] = answer
            message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
            if session:
                message["sessionId"] = session
            self._write(json.dumps(message).encode() + b"\0")
        return self.wait(answer, method)

    def expect(self, event: str, session: str) -> Future[dict[str, Any]]:
        """Return a future for a tab's next `event`. Call it before the action that triggers it."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            self._waiting[session, event] = answer
        return answer

    def wait(self, answer: Future[dict[str, Any]], what: str) -> dict[str, Any]:
        try:
            return answer.result(ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise EnvironmentFailed(
                f"Chromium gave no answer to {what} within {ANSWER_TIMEOUT_S:.0f} s",
                "the rollout is dropped; fewer rollouts at once leave each more of the machine",
            ) from None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """Close the pipe, which ends the browser, and wait for it."""
        with self._lock:
            self._closed = True
            self._out.close()
        self.process.wait(ANSWER_TIMEOUT_S)

    @property
    def _out(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _write(self, data: bytes) -> None:
        if self._closed:
            raise self._ended_error()
        try:
            while data:
                data = data[self._out.write(data) :]
        except BrokenPipeError:
            raise self._ended_error() from None

    def _read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        with self.process.stdout as pipe:
            while data := pipe.read(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for message in messages:
                    self._dispatch_message(json.loads(message))
        with self._lock:
            self._closed = True
            lost = [*self._pending.values(), *self._waiting.values()]
        for answer in lost:
            if not answer.done():
                answer.set_exception(self._ended_error())

    def _dispatch_message(self, message: dict[str, Any]) -> None:
        with self._lock:
            if "id" in message:
                answer = self._pending.pop(message["id"], None)
            else:
                place = (message.get("sessionId", ""), message["method"])
                answer = self._waiting.pop(place, None)
        if answer is None:
            return
        if "error" in message:
            answer.set_exception(
                EnvironmentFailed(
                    f"Chromium refused: {message['error'].get('message')}", "look at the page"
                )
            )
        else:
            answer.set_result(message.get("result", message.get("params", {})))

    def _ended_error(self) -> EnvironmentFailed:
        return EnvironmentFailed(
            "Chromium has ended", f"try `{Path(self.path).name} --headless about:blank` by hand"
        )


@dataclass(frozen=True)
class Tab:
    """A browser tab of fixed size."""

    browser: Chromium
    session: str
    context: str

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.browser.call(method, params, self.session)

    def go(self, url: str) -> None:
        """Open the url and wait until its page has loaded."""
        loaded = self.browser.expect("Page.loadEventFired", self.session)
        answer = self.call("Page.navigate", {"url": url})
        if answer.get("errorText"):
            raise EnvironmentFailed(f"{url}: {answer['errorText']}", "look at the page's server")
        self.browser.wait(loaded, f"the load of {url}")

    def click(self, x: int, y: int) -> None:
        """Press and release the mouse. If it follows a link, wait for the page."""
        link = f"!!document.elementFromPoint({x}, {y})?.closest('a[href]')"
        loaded = None
        if self.evaluate(link):
            loaded = self.browser.expect("Page.loadEventFired", self.session)
        place = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", {"type": kind, **place})
        if loaded is not None:
            self.browser.wait(loaded, "a click on a link")

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", {"expression": script, "returnByValue": True})
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Return a PNG of the tab."""
        answer = self.call("Page.captureScreenshot", {"format": "png"})
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        if self.browser.is_alive:
            self.browser.call("Target.disposeBrowserContext", {"browserContextId": self.context})
