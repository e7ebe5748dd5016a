from __future__ import annotations

import asyncio
import io
import random
from typing import Any

from answering import ScriptedChat
from PIL import Image

from sightline.envs import Outcome, load_environment
from sightline.envs.color_codeword import COLORS, LETTERS, WORDS, ColorCodeword
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


def test_right_letters_earn_everything(store: MediaStore) -> None:
    word = truth()
    outcome, chat = play(store, [word[:1], word[:2], word])
    assert outcome.reward == 1.0
    assert outcome.parts == {"letters": 1.0, "exact": 1.0, "malformed": 0.0}
    assert outcome.per_turn == [1.0, 1.0, 1.0]
    assert [len(message.images) for message in chat.seen] == [1, 1, 1]


def test_a_wrong_letter_costs_its_share_and_its_turn(store: MediaStore) -> None:
    word = truth()
    said = wrong(word[0]) + word[1:]
    outcome, _ = play(store, [said[:1], said[:2], said])
    assert outcome.parts["letters"] == 2 / 3 and outcome.parts["exact"] == 0.0
    assert outcome.per_turn == [0.0, 1.0, 1.0]


def test_a_malformed_answer_costs_extra_and_the_measure_is_without_it(store: MediaStore) -> None:
    word = truth()
    outcome, _ = play(store, [word[:1], word[:2], word + "x"])
    assert outcome.parts["letters"] == 1.0 and outcome.parts["malformed"] == 1.0
    assert outcome.reward == 1.0 - 0.3
    assert outcome.per_turn == [1.0, 1.0, 1.0 - 0.3]


def test_a_letter_that_is_not_repeated_is_lost_and_one_that_is_mended_is_paid(
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


def test_several_squares_a_turn_are_several_images(store: MediaStore) -> None:
    word = truth(squares=2)
    assert len(word) == 6
    outcome, chat = play(store, [word[:2], word[:4], word], squares=2)
    assert outcome.reward == 1.0
    assert [len(message.images) for message in chat.seen] == [2, 2, 2]


def test_tasks_are_fixed_by_split_and_index() -> None:
    env, again = ColorCodeword(), load_environment("color_codeword", {})
    assert [env.task(i, "train") for i in range(50)] == [again.task(i, "train") for i in range(50)]
    train = [tuple(env.task(i, "train").data) for i in range(256)]
    held_out = [tuple(env.task(i, "eval").data) for i in range(256)]
    assert train != held_out


def test_every_shade_is_nearest_to_its_own_colour() -> None:
    env = ColorCodeword()
    for letter in LETTERS:
        for shade in range(env.shades):
            colour = Image.open(io.BytesIO(env.square(letter, shade))).getpixel((0, 0))
            nearest = min(
                COLORS,
                key=lambda x: sum((a - b) ** 2 for a, b in zip(COLORS[x], colour, strict=True)),
            )
            assert nearest == letter


def test_demonstrations_teach_the_format_and_no_colour(store: MediaStore) -> None:
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


def test_in_words_nothing_is_shown_and_every_colour_has_its_name(store: MediaStore) -> None:
    word = truth()
    outcome, chat = play(store, [word[:1], word[:2], word], in_words=True)
    assert outcome.reward == 1.0
    assert [message.text for message in chat.seen] == [WORDS[letter] for letter in word]
    assert not any(message.images for message in chat.seen)
    assert len(set(WORDS.values())) == len(COLORS)
    assert ColorCodeword().shows_media and not ColorCodeword(in_words=True).shows_media


def test_demonstrations_in_words_name_a_letter_or_a_colour_without_its_letter(
    store: MediaStore,
) -> None:
    env = ColorCodeword(in_words=True)
    talks = [
        env.demonstration(env.task(i, "train"), store.put, random.Random(i)) for i in range(200)
    ]
    pairs = [(talk[0].text, talk[1].text) for talk in talks]
    assert not any(message.images for talk in talks for message in talk)
    assert all(said == letter for said, letter in pairs if said in LETTERS)
    coloured = [pair for pair in pairs if pair[0] not in LETTERS]
    told = sum(WORDS[letter] == said for said, letter in coloured)
    assert len(coloured) > 30 and told < len(coloured) / 3
