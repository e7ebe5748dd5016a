from __future__ import annotations

import asyncio
import random
from typing import Any

from answering import ScriptedChat
from frame_order import FrameOrder

from sightline.envs import Outcome
from sightline.media import MediaStore


def play(store: MediaStore, answer: str, **args: Any) -> tuple[Outcome, ScriptedChat]:
    env, chat = FrameOrder(**args), ScriptedChat(store, [answer])
    return asyncio.run(env.rollout(env.task(0, "train"), chat)), chat


def test_colours_in_order_earn_the_full_reward(store: MediaStore) -> None:
    letters = FrameOrder().task(0, "train").data.letters
    outcome, chat = play(store, letters)
    assert outcome.reward == 1.0 and outcome.parts == {"right": 1.0, "malformed": 0.0}
    (message,) = chat.seen
    (videos,) = message.videos
    assert [frame.seconds for frame in videos.frames] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert len(set(videos.refs)) == 3


def test_demonstrations_show_colours_but_no_order(store: MediaStore) -> None:
    env, rng = FrameOrder(), random.Random(0)
    counts = {"plain": 0, "right": 0, "wrong": 0}
    for i in range(600):
        task = env.task(i, "sft")
        _, answer = env.demonstration(task, store.put, rng)
        if len(set(answer.text)) == 1:
            counts["plain"] += 1
        else:
            counts["right" if answer.text == task.data.letters else "wrong"] += 1
    assert 240 < counts["plain"] < 360
    assert counts["right"] < 0.3 * counts["wrong"]
