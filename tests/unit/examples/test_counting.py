from __future__ import annotations

import asyncio
import io
import random
from typing import Any

import numpy as np
import pytest
from answering import ScriptedChat
from counting import Counting
from PIL import Image

from sightline.envs import Outcome
from sightline.media import MediaStore


def play(store: MediaStore, answer: str, **args: Any) -> tuple[Outcome, ScriptedChat]:
    env, chat = Counting(**args), ScriptedChat(store, [answer])
    return asyncio.run(env.rollout(env.task(0, "train"), chat)), chat


def num_blobs(picture: bytes) -> int:
    """Counts regions of dark pixels that touch, with no look at how they were drawn."""
    dark = np.asarray(Image.open(io.BytesIO(picture)).convert("L")) < 128
    seen, count = np.zeros_like(dark), 0
    for start in zip(*np.nonzero(dark), strict=True):
        if seen[start]:
            continue
        count += 1
        waiting = [start]
        while waiting:
            y, x = waiting.pop()
            inside = 0 <= y < dark.shape[0] and 0 <= x < dark.shape[1]
            if inside and dark[y, x] and not seen[y, x]:
                seen[y, x] = True
                waiting += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return count


def test_the_right_digit_earns_everything_in_one_turn(store: MediaStore) -> None:
    count = len(Counting().task(0, "train").data.cells)
    outcome, chat = play(store, str(count))
    assert outcome.reward == 1.0 and outcome.parts == {"right": 1.0, "malformed": 0.0}
    assert [len(message.images) for message in chat.seen] == [1]


@pytest.mark.parametrize(("side", "cells"), [(32, 3), (64, 4), (96, 6)])
def test_a_picture_shows_as_many_blobs_as_the_answer_says(side: int, cells: int) -> None:
    env = Counting(side=side, cells=cells)
    counts = set()
    for index in range(60):
        scene = env.task(index, "train").data
        picture = env.draw(scene)
        assert Image.open(io.BytesIO(picture)).size == (side, side)
        assert num_blobs(picture) == len(scene.cells)
        counts.add(len(scene.cells))
    assert counts == {1, 2, 3, 4, 5}


def test_demonstrations_teach_the_format_and_no_number(store: MediaStore) -> None:
    env = Counting(spelled_fraction=0.0)
    right = 0
    for i in range(150):
        task = env.task(i, "sft")
        shown, said = env.demonstration(task, store.put, random.Random(i))
        assert said.text in env.answers and len(shown.images) == 1
        right += said.text == str(len(task.data.cells))
    assert 0.1 < right / 150 < 0.32
