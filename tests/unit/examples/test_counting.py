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

from sightline.envs import Outcome, load_environment
from sightline.errors import ConfigError
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


def test_a_wrong_digit_earns_nothing_and_nonsense_costs(store: MediaStore) -> None:
    count = len(Counting().task(0, "train").data.cells)
    assert play(store, str(count % 5 + 1))[0].reward == 0.0
    for nonsense in (f"{count} ", "six", "", "6"):
        outcome, _ = play(store, nonsense)
        assert outcome.reward == -0.3 and outcome.parts == {"right": 0.0, "malformed": 1.0}


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


def test_tasks_are_fixed_by_split_and_index() -> None:
    env, again = Counting(), load_environment("counting:Counting", {})
    assert [env.task(i, "train") for i in range(50)] == [again.task(i, "train") for i in range(50)]
    train = {env.draw(env.task(i, "train").data) for i in range(500)}
    held_out = {env.draw(env.task(i, "eval").data) for i in range(500)}
    assert len(train) > 450 and len(train & held_out) < 50


def test_demonstrations_teach_the_format_and_no_number(store: MediaStore) -> None:
    env = Counting(spelled_fraction=0.0)
    right = 0
    for i in range(150):
        task = env.task(i, "sft")
        shown, said = env.demonstration(task, store.put, random.Random(i))
        assert said.text in env.answers and len(shown.images) == 1
        right += said.text == str(len(task.data.cells))
    assert 0.1 < right / 150 < 0.32


def test_spelled_demonstrations_show_the_digit_that_they_say(store: MediaStore) -> None:
    env = Counting(spelled_fraction=1.0)
    shown: dict[str, set[str]] = {}
    for i in range(60):
        picture, said = env.demonstration(env.task(i, "sft"), store.put, random.Random(i))
        shown.setdefault(said.text, set()).add(picture.images[0].digest)
    assert all(len(digests) == 1 for digests in shown.values())
    assert len(set.union(*shown.values())) == len(shown) == 5


@pytest.mark.parametrize("args", [{"most": 0}, {"most": 10}, {"cells": 2}, {"side": 8}])
def test_what_cannot_be_drawn_is_refused(args: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Counting(**args)


def test_an_argument_of_another_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="spelled_fraction"):
        load_environment("counting:Counting", {"spelled_share": 0.5})
