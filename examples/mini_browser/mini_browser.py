"""mini_browser: click through pages in a real headless Chromium.

Every page has a banner of one colour and several buttons. The button of the banner's colour leads
to the next page, and any other to the same page with a frame around it. The worker serves pages on
loopback. An observation is a screenshot. An action is `click X Y` (`actions = "text"`) or a call of
the tool `click` (`"tool"`).
"""

from __future__ import annotations

import asyncio
import html
import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from chromium import Chromium, Tab, get_chromium

from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.envs.threads import start_thread
from sightline.envs.tools import Toolbox, reply_to_calls
from sightline.errors import ConfigError
from sightline.message import AssistantMessage, Message, ToolCall, assistant

COLORS = ("#d62828", "#2a9d4a", "#2b4fd6", "#e0b400", "#8e2bd6", "#12b0b8")
DONE = "done"


def click(x: int, y: int) -> None:
    """Clicks at a point of the page, in pixels from its corner."""


@dataclass(frozen=True)
class Button:
    left: int
    top: int
    width: int
    height: int
    color: str

    @property
    def middle(self) -> tuple[int, int]:
        return self.left + self.width // 2, self.top + self.height // 2


@dataclass(frozen=True)
class Page:
    wanted: int
    """Index of the button that leads to the next page."""
    buttons: tuple[Button, ...]


@dataclass(eq=False)
class MiniBrowser(Environment):
    """`pages` pages of `width` x `height` pixels, each with `buttons` buttons."""

    name = "mini_browser"

    pages: int = 3
    buttons: int = 3
    max_turns: int = 6
    width: int = 160
    height: int = 128
    actions: str = "text"
    hint: str = ""
    malformed_penalty: float = 0.1
    expert_fraction: float = 0.5
    """Fraction of demonstrations that click on the right button."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.buttons <= len(COLORS) or self.pages < 1 or self.max_turns < 1:
            raise ConfigError(
                f"mini_browser: {self.buttons} buttons on {self.pages} pages do not work in "
                f"{self.max_turns} turns",
                f"take 2 to {len(COLORS)} buttons, and at least a page and a turn",
            )
        if self.width < 96 or self.height < 64:
            raise ConfigError(
                f"mini_browser: {self.width}x{self.height} is too small", "make it 96x64 or larger"
            )
        if self.actions not in ("text", "tool"):
            raise ConfigError(
                f"mini_browser: unknown [env.args] actions = {self.actions!r}",
                "use 'text' or 'tool'",
            )
        self.toolbox = Toolbox(click)
        self.tools = self.toolbox.schemas if self.actions == "tool" else None
        self._starting = threading.Lock()
        self._started: Chromium | None = None
        self._idle: list[Tab] = []
        get_chromium()

    def task(self, index: int, split: str) -> Task:
        rng = self.task_rng(index, split)
        return Task(index, split, tuple(self._page(rng) for _ in range(self.pages)))

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        # Use threads, so that other rollouts continue during slow calls such as screenshots.
        tab = await asyncio.to_thread(self.open, task)
        try:
            outcome = await self._play(tab, chat)
        except BaseException:
            # Do not wait: a browser that hangs would block a failed rollout.
            start_thread(tab.close, "close-tab")
            raise
        self._idle.append(tab)
        return outcome

    async def _play(self, tab: Tab, chat: Chat) -> Outcome:
        passed, num_malformed, answer = 0, 0, None
        per_turn: list[float] = []
        while passed < self.pages and len(per_turn) < self.max_turns:
            picture = chat.put(await asyncio.to_thread(tab.screenshot))
            answer = await chat.send(reply_to_calls(answer, self.hint, picture), tools=self.tools)
            action = self.read_click(answer)
            before = passed
            if action is None:
                num_malformed += 1
            else:
                await asyncio.to_thread(tab.click, *action)
                passed = await asyncio.to_thread(self._passed, tab)
            gain = (passed - before) / self.pages
            per_turn.append(gain - self.malformed_penalty * (action is None))
        return Outcome(
            reward=sum(per_turn),
            parts={
                "passed": passed / self.pages,
                "turns": float(len(per_turn)),
                "malformed": num_malformed / len(per_turn),
            },
            per_turn=per_turn,
        )

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """Show the first page and click one of its buttons, in some demonstrations the right one.

        The picture is a real screenshot.
        """
        page: Page = task.data[0]
        which = page.wanted if rng.random() < self.expert_fraction else rng.randrange(self.buttons)
        tab = self.open(task)
        picture = put(tab.screenshot())
        self._idle.append(tab)
        clicked = self.write_click(*page.buttons[which].middle)
        return [*reply_to_calls(None, self.hint, picture), clicked]

    def read_click(self, answer: AssistantMessage) -> tuple[int, int] | None:
        """Return the point that an answer clicks at, or None."""
        if self.tools is None:
            match = re.fullmatch(r"click ([0-9]{1,9}) ([0-9]{1,9})", answer.text)
            point = None if match is None or answer.tool_calls else (int(match[1]), int(match[2]))
        else:
            values = self.toolbox.read(answer)
            point = None if values is None else (values["x"], values["y"])
        if point is None or not (0 <= point[0] < self.width and 0 <= point[1] < self.height):
            return None
        return point

    def write_click(self, x: int, y: int) -> Message:
        if self.tools is None:
            return assistant(f"click {x} {y}")
        call = ToolCall("click", json.dumps({"x": x, "y": y}))
        return Message(role="assistant", tool_calls=(call,))

    def open(self, task: Task) -> Tab:
        """Return a tab that shows the first page of the task."""
        # Tabs are processes and pages keep no state, so tabs of finished rollouts are reused.
        browser = self._browser
        try:
            tab = self._idle.pop()
        except IndexError:
            tab = browser.open_tab(self.width, self.height)
        tab.go(f"http://127.0.0.1:{self._port}/{task.split}/{task.index}/0")
        return tab

    def _passed(self, tab: Tab) -> int:
        name = str(tab.evaluate("location.pathname")).rsplit("/", 1)[-1]
        return self.pages if name == DONE else int(name)

    def _page(self, rng: random.Random) -> Page:
        """Place buttons in a grid below the banner, so that none overlap."""
        rows, columns = 2, 3
        banner = self.height // 4
        width, height = self.width // columns, (self.height - banner) // rows
        cells = rng.sample([(r, c) for r in range(rows) for c in range(columns)], self.buttons)
        colors = rng.sample(COLORS, self.buttons)
        buttons = tuple(
            Button(c * width + 4, banner + r * height + 4, width - 8, height - 8, color)
            for (r, c), color in zip(cells, colors, strict=True)
        )
        return Page(rng.randrange(self.buttons), buttons)

    def html(self, task: Task, number: int, wrong: bool) -> str:
        """Return the HTML of a page."""
        page: Page = task.data[number]
        frame = "outline: 3px solid #000; outline-offset: -3px;" if wrong else ""
        after = str(number + 1) if number + 1 < self.pages else DONE
        boxes = [
            f'<div style="left:0;top:0;width:{self.width}px;height:{self.height // 4 - 4}px;'
            f'background:{page.buttons[page.wanted].color}"></div>'
        ]
        for i, button in enumerate(page.buttons):
            href = after if i == page.wanted else f"{number}?wrong"
            boxes.append(
                f'<a href="{html.escape(href)}" style="left:{button.left}px;top:{button.top}px;'
                f'width:{button.width}px;height:{button.height}px;background:{button.color}"></a>'
            )
        return (
            "<!doctype html><title>page</title><style>body{margin:0;background:#fff}"
            f"div,a{{position:absolute;display:block}}</style><body style='{frame}"
            f"width:{self.width}px;height:{self.height}px'>{''.join(boxes)}"
        )

    # -- created once per process, when the first task is opened --------------------------------

    @property
    def _browser(self) -> Chromium:
        """Return the browser, restarted if it has ended."""
        with self._starting:
            if self._started is None or not self._started.is_alive:
                self._idle.clear()
                self._started = Chromium(get_chromium())
            return self._started

    @property
    def _port(self) -> int:
        with self._starting:
            return int(self._server.server_address[1])

    @cached_property
    def _server(self) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _build_handler(self._answer))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def _answer(self, path: str) -> str | None:
        """Return the page at a path of the server, or None."""
        place, _, query = path.partition("?")
        parts = place.strip("/").split("/")
        if len(parts) != 3 or not parts[1].isdigit():
            return None
        task = self.task(int(parts[1]), parts[0])
        if parts[2] == DONE:
            return "<!doctype html><title>done</title><body style='background:#fff'>"
        if not parts[2].isdigit() or int(parts[2]) >= self.pages:
            return None
        return self.html(task, int(parts[2]), wrong=query == "wrong")

    def close(self) -> None:
        """Stop the browser and the server, if they were started."""
        if self._started is not None:
            self._started.close()
        if "_server" in self.__dict__:
            self._server.shutdown()
            self._server.server_close()


def _build_handler(answer: Callable[[str], str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = answer(self.path)
            body = (page or "no such page").encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    return Handler
