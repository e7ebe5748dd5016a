from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from answering import ScriptedChat
from frame_order import FrameOrder

from sightline.envs import Outcome, load_environment
from sightline.errors import ConfigError
from sightline.media import MediaStore


def play(store: MediaStore, answer: str, **args: Any) -> tuple[Outcome, ScriptedChat]:
    env, chat = FrameOrder(**args), ScriptedChat(store, [answer])
    return asyncio.run(env.rollout(env.task(0, "train"), chat)), chat


def test_the_colours_in_their_order_earn_everything(store: MediaStore) -> None:
    letters = FrameOrder().task(0, "train").data.letters
    outcome, chat = play(store, letters)
    assert outcome.reward == 1.0 and outcome.parts == {"right": 1.0, "malformed": 0.0}
    (message,) = chat.seen
    (shown,) = message.videos
    assert [frame.seconds for frame in shown.frames] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert len(set(shown.refs)) == 3


def test_places_that_are_right_earn_their_share_and_other_letters_cost(store: MediaStore) -> None:
    a, b, c = FrameOrder().task(0, "train").data.letters
    assert play(store, a + c + b)[0].reward == pytest.approx(1 / 3)
    assert play(store, b + c + a)[0].reward == 0.0
    for nonsense in (a + a + b, a + b, a + b + c + c, "", "RGY"):
        outcome, _ = play(store, nonsense)
        assert outcome.reward == -0.3 and outcome.parts == {"right": 0.0, "malformed": 1.0}


def test_every_task_shows_the_same_colours_in_every_order() -> None:
    env = FrameOrder()
    orders = Counter(env.task(i, "train").data.letters for i in range(600))
    assert len(orders) == 6 and min(orders.values()) > 60
    assert env.task(3, "train") == env.task(3, "train") != env.task(3, "eval")


def test_demonstrations_tell_colours_and_no_order(store: MediaStore) -> None:
    env, rng = FrameOrder(), random.Random(0)
    told = {"plain": 0, "right": 0, "wrong": 0}
    for i in range(600):
        task = env.task(i, "sft")
        _, answer = env.demonstration(task, store.put, rng)
        if len(set(answer.text)) == 1:
            told["plain"] += 1
        else:
            told["right" if answer.text == task.data.letters else "wrong"] += 1
    assert 240 < told["plain"] < 360
    assert told["right"] < 0.3 * told["wrong"]


def test_it_loads_by_its_name_and_refuses_what_it_cannot_show() -> None:
    assert isinstance(load_environment("frame_order:FrameOrder", {}), FrameOrder)
    for colors in (1, 5):
        with pytest.raises(ConfigError, match="colors"):
            FrameOrder(colors=colors)
