from __future__ import annotations

import asyncio
import random
from typing import Any

from answering import ScriptedChat

from sightline.envs import Outcome
from sightline.envs.color_codeword import LETTERS, ColorCodeword
from sightline.media import MediaStore


def play(store: MediaStore, answers: list[str], **args: Any) -> tuple[Outcome, ScriptedChat]:
    env = ColorCodeword(**args)
    task = env.task(0, "train")
    chat = ScriptedChat(store, answers)
    return asyncio.run(env.rollout(task, chat)), chat


def truth(turns: int = 3, **args: Any) -> str:
    env = ColorCodeword(**args)
    return "".join(letter for letter, _ in env.task(0, "train").data)


def wrong(letter: str) -> str:
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


def test_correct_letters_earn_the_full_reward(store: MediaStore) -> None:
    word = truth()
    outcome, chat = play(store, [word[:1], word[:2], word])
    assert outcome.reward == 1.0
    assert outcome.parts == {"letters": 1.0, "exact": 1.0, "malformed": 0.0}
    assert outcome.per_turn == [1.0, 1.0, 1.0]
    assert [len(message.images) for message in chat.seen] == [1, 1, 1]


def test_unrepeated_letter_is_lost_and_corrected_letter_is_rewarded(
    store: MediaStore,
) -> None:
    word = truth()
    forgotten = wrong(word[0]) + word[1:]
    outcome, _ = play(store, [word[:1], forgotten[:2], forgotten])
    assert outcome.per_turn == [1.0, 0.0, 1.0]
    mended, _ = play(store, [forgotten[:1], word[:2], word])
    assert mended.per_turn == [0.0, 2.0, 1.0]
    for one in (outcome, mended):
        assert sum(one.per_turn or []) == round(3 * one.parts["letters"])


def test_demonstrations_show_the_format_but_no_colour(store: MediaStore) -> None:
    env = ColorCodeword()
    right = total = 0
    for i in range(200):
        task = env.task(i, "sft")
        talk = env.demonstration(task, store.put, random.Random(i))
        answers = [message.text for message in talk if message.role == "assistant"]
        assert answers[1].startswith(answers[0]) and answers[2].startswith(answers[1])
        assert len(answers[2]) == 3 and set(answers[2]) <= set(LETTERS)
        right += sum(a == b for a, (b, _) in zip(answers[2], task.data, strict=True))
        total += 3
    assert right / total < 0.2
