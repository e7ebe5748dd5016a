from __future__ import annotations

import asyncio
import random
from typing import Any

from answering import ScriptedChat
from counting import Counting

from sightline.envs import Outcome
from sightline.media import MediaStore


def play(store: MediaStore, answer: str, **args: Any) -> tuple[Outcome, ScriptedChat]:
    env, chat = Counting(**args), ScriptedChat(store, [answer])
    return asyncio.run(env.rollout(env.task(0, "train"), chat)), chat


def test_correct_digit_earns_the_full_reward_in_one_turn(store: MediaStore) -> None:
    count = len(Counting().task(0, "train").data.cells)
    outcome, chat = play(store, str(count))
    assert outcome.reward == 1.0 and outcome.parts == {"right": 1.0, "malformed": 0.0}
    assert [len(message.images) for message in chat.seen] == [1]


def test_demonstrations_show_the_format_but_no_number(store: MediaStore) -> None:
    env = Counting(spelled_fraction=0.0)
    right = 0
    for i in range(150):
        task = env.task(i, "sft")
        demonstration, answer = env.demonstration(task, store.put, random.Random(i))
        assert answer.text in env.answers and len(demonstration.images) == 1
        right += answer.text == str(len(task.data.cells))
    assert 0.1 < right / 150 < 0.32
