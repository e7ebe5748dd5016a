"""A dashboard as a user starts it, and Debian's Chromium to open it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import get_chromium
from playwright.sync_api import Browser, Page, expect, sync_playwright
from synthetic_run import SyntheticSize, write_synthetic_run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=get_chromium(),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Yield a page whose scripts must not fail or log errors."""
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    context.set_default_timeout(60_000)
    page = context.new_page()
    printed: list[str] = []
    page.on("pageerror", lambda error: printed.append(str(error)))
    page.on(
        "dialog", lambda dialog: (printed.append(f"dialog: {dialog.message}"), dialog.dismiss())
    )
    page.on(
        "console", lambda message: printed.append(message.text) if message.type == "error" else None
    )
    yield page
    context.close()
    # A missing image is a 404, which Chromium logs as a console error.
    # Over plain HTTP with a name other than localhost, Chromium omits a header and logs it.
    expected = (
        "404", "415", "ERR_CONNECTION_REFUSED", "ERR_SOCKET_NOT_CONNECTED",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "The Cross-Origin-Opener-Policy header has been ignored",
    )  # fmt: skip
    assert [text for text in printed if not any(word in text for word in expected)] == []


class Serve:
    """Start `sightline view` on folders, and yield its address."""

    def __init__(self) -> None:
        self._started: dict[str, subprocess.Popen[str]] = {}

    def __call__(self, *paths: Path, options: tuple[str, ...] = ()) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "sightline", "view", *map(str, paths), "--port", "0", *options],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().strip().rstrip("/")
        self._started[address] = process
        return address

    def end(self, address: str) -> None:
        process = self._started.pop(address)
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    serve = Serve()
    yield serve
    for address in list(serve._started):
        serve.end(address)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "shop-001"
    write_synthetic_run(
        path, SyntheticSize(steps=6, rollouts_per_step=40, images=20, conversations=40)
    )
    return path


@pytest.fixture(scope="session")
def small(serve: Serve, small_run: Path) -> str:
    return serve(small_run)
