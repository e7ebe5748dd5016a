"""The task in a real browser. Needs Chromium."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mini_browser
import pytest
from answering import ScriptedChat
from mini_browser import MiniBrowser, Page

from sightline.errors import EnvironmentFailed
from sightline.media import MediaStore

MODULE_FOLDER = str(Path(mini_browser.__file__).parent)


@pytest.fixture(scope="module")
def env() -> Iterator[MiniBrowser]:
    browser = MiniBrowser()
    yield browser
    browser.close()


def clicks(pages: tuple[Page, ...]) -> list[str]:
    return ["click {} {}".format(*page.buttons[page.wanted].middle) for page in pages]


def play(env: MiniBrowser, store: MediaStore, answers: list[Any], index: int = 0) -> Any:
    chat = ScriptedChat(store, answers)
    return asyncio.run(env.rollout(env.task(index, "train"), chat)), chat


@pytest.mark.browser
def test_correct_clicks_visit_all_pages(env: MiniBrowser, store: MediaStore) -> None:
    outcome, chat = play(env, store, clicks(env.task(0, "train").data))
    assert outcome.reward == pytest.approx(1.0)
    assert outcome.parts == {"passed": 1.0, "turns": 3.0, "malformed": 0.0}
    assert outcome.per_turn == pytest.approx([1 / 3] * 3)
    images = [message.images[0] for message in chat.seen]
    assert len({ref.digest for ref in images}) == 3, "every page looks different"
    assert {(ref.width, ref.height) for ref in images} == {(160, 128)}


@pytest.mark.browser
def test_wrong_click_stays_on_the_page_and_invalid_action_is_penalized(
    env: MiniBrowser, store: MediaStore
) -> None:
    first = env.task(0, "train").data[0]
    other = first.buttons[(first.wanted + 1) % len(first.buttons)].middle
    answers = ["click here", "click {} {}".format(*other), "click 0 127", *["x"] * 3]
    outcome, chat = play(env, store, answers)
    assert outcome.per_turn == pytest.approx([-0.1, 0.0, 0.0, -0.1, -0.1, -0.1])
    assert outcome.parts["passed"] == 0.0
    digests = [message.images[0].digest for message in chat.seen]
    assert digests[0] == digests[1] != digests[2] == digests[3]


@pytest.mark.browser
def test_demonstrations_click_a_button_on_the_shown_page(
    env: MiniBrowser, store: MediaStore
) -> None:
    task = env.task(2, "sft")
    demonstration, answer = env.demonstration(task, store.put, random.Random(0))
    assert env.read_click(answer) in [button.middle for button in task.data[0].buttons]
    again, _ = env.demonstration(task, store.put, random.Random(1))
    assert demonstration.images == again.images, "the same page is the same picture"


@pytest.mark.browser
def test_dead_browser_breaks_its_rollouts_and_is_replaced(store: MediaStore) -> None:
    env = MiniBrowser(pages=1)
    try:
        tab = env.open(env.task(0, "train"))
        tab.browser.close()
        with pytest.raises(EnvironmentFailed, match="Chromium has ended"):
            tab.screenshot()
        outcome, _ = play(env, store, clicks(env.task(0, "train").data))
        assert outcome.reward == pytest.approx(1.0)
    finally:
        env.close()


@pytest.mark.browser
def test_a_killed_process_leaves_no_browser_and_no_profile(tmp_path: Path) -> None:
    script = (
        f"import os, sys, tempfile; sys.path.append({MODULE_FOLDER!r})\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from mini_browser import MiniBrowser\n"
        "env = MiniBrowser(); env.open(env.task(0, 'train'))\n"
        "assert os.listdir(tempfile.tempdir); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -9
    deadline = time.monotonic() + 30
    while (left := users_of(tmp_path)) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, (left, list(tmp_path.iterdir()))
        time.sleep(0.05)


def users_of(folder: Path) -> list[str]:
    """Return the processes whose command line contains the folder."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and str(folder).encode() in words:
            pids.append(words.decode(errors="replace")[:100])
    return pids
