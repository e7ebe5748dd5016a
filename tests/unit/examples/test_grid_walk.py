from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path
from typing import Any

import pytest
from answering import ScriptedChat
from grid_walk import GOAL, MOVES, WALKER, GridWalk, Maze, word_of
from PIL import Image

from sightline.envs import Outcome
from sightline.errors import ConfigError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import Message
from sightline.trainer.sft import build_sample


def play(env: GridWalk, store: MediaStore, answers: Any) -> tuple[Outcome, ScriptedChat]:
    chat = ScriptedChat(store, answers)
    return asyncio.run(env.rollout(env.task(0, "train"), chat)), chat


def shortest(env: GridWalk, maze: Maze) -> list[str]:
    """Moves of a shortest way."""
    left, at, moves = env.distances(maze), maze.start, []
    while at != maze.goal:
        move = next(m for m in MOVES if left[env.step(maze, at, m)] < left[at])
        at = env.step(maze, at, move)
        moves.append(move)
    return moves


def places(env: GridWalk, picture: bytes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where walker and goal are, read from the picture alone."""
    image = Image.open(io.BytesIO(picture))
    pitch = env.side // env.cells
    at: dict[Any, tuple[int, int]] = {}
    for row in range(env.cells):
        for column in range(env.cells):
            at[image.getpixel((int((column + 0.5) * pitch), int((row + 0.5) * pitch)))] = (
                row,
                column,
            )
    return at[WALKER], at[GOAL]


def test_the_shortest_way_earns_everything(store: MediaStore) -> None:
    env = GridWalk(walls=3)
    moves = shortest(env, env.task(0, "train").data)
    outcome, chat = play(env, store, moves)
    assert outcome.reward == pytest.approx(1.0) and outcome.parts["reached"] == 1.0
    assert outcome.per_turn == pytest.approx([1 / len(moves)] * len(moves))
    assert [len(message.images) for message in chat.seen] == [1] * len(moves)
    assert chat.tools == [None] * len(moves)


def test_moves_are_tool_calls_and_pictures_their_results(store: MediaStore) -> None:
    env = GridWalk(actions="tool")
    moves = shortest(env, env.task(0, "train").data)
    outcome, chat = play(env, store, [env.action_format.write((word_of(m),)) for m in moves])
    assert outcome.parts["reached"] == 1.0 and outcome.parts["malformed"] == 0.0
    assert [message.role for message in chat.seen] == ["user"] + ["tool"] * (len(moves) - 1)
    assert all(len(message.images) == 1 for message in chat.seen)
    assert all(tools[0]["function"]["name"] == "move" for tools in chat.tools)


def test_a_step_back_is_paid_back_and_nonsense_costs_and_moves_nothing(store: MediaStore) -> None:
    env = GridWalk(max_turns=4)
    maze = Maze((1, 1), (1, 3), frozenset())
    env.task = lambda index, split: type("T", (), {"data": maze})()  # type: ignore[method-assign]
    outcome, chat = play(env, store, ["L", "right", "R", "R"])
    assert outcome.per_turn == pytest.approx([-0.5, -0.3, 0.5, 0.5])
    assert outcome.parts == {"reached": 0.0, "progress": 0.5, "turns": 4.0, "malformed": 0.25}
    assert chat.seen[1].images == chat.seen[2].images, "the walker stays where it is"


def test_the_picture_says_where_walker_and_goal_are() -> None:
    env = GridWalk(walls=4)
    for index in range(20):
        maze = env.task(index, "train").data
        assert places(env, env.draw(maze, maze.start)) == (maze.start, maze.goal)


def test_a_wall_and_the_edge_are_in_the_way() -> None:
    env = GridWalk()
    maze = Maze((0, 0), (3, 3), frozenset({(0, 1)}))
    assert env.step(maze, (0, 0), "R") == env.step(maze, (0, 0), "U") == (0, 0)
    assert env.step(maze, (0, 0), "D") == (1, 0)


def test_every_task_has_a_way_and_is_fixed_by_split_and_index() -> None:
    env, again = GridWalk(walls=5), GridWalk(walls=5)
    for index in range(100):
        task = env.task(index, "train")
        assert task == again.task(index, "train")
        assert env.distances(task.data)[task.data.start] > 0
    assert [env.task(i, "train").data for i in range(9)] != [
        env.task(i, "eval").data for i in range(9)
    ]


@pytest.mark.parametrize("actions", ["text", "tool"])
def test_demonstrations_can_be_read_back_and_experts_arrive(
    store: MediaStore, actions: str
) -> None:
    for share, arrives in ((1.0, True), (0.0, False)):
        env = GridWalk(actions=actions, expert_fraction=share, max_turns=6)
        ends = []
        for i in range(20):
            task = env.task(i, "sft")
            talk = env.demonstration(task, store.put, random.Random(i))
            at = task.data.start
            for message in talk:
                if message.role == "assistant":
                    action = env.action_format.read(message)
                    assert action is not None
                    letter = action[0] if actions == "text" else action[0][0].upper()
                    at = env.step(task.data, at, letter)
            ends.append(at == task.data.goal)
        assert all(ends) == arrives


def test_a_demonstration_with_tools_offers_them_in_its_prompt(
    tiny_model: Path, store: MediaStore
) -> None:
    env = GridWalk(actions="tool", max_turns=2)
    talk = env.demonstration(env.task(0, "sft"), store.put, random.Random(0))
    renderer = load_renderer(tiny_model, store)
    plain, offered = build_sample(talk, renderer, "a"), build_sample(talk, renderer, "b", env.tools)
    assert len(offered.token_ids) > len(plain.token_ids) + 100
    assert len(offered.trained) == len(plain.trained)


@pytest.mark.parametrize("args", [{"cells": 1}, {"walls": 9}, {"side": 4}, {"actions": "voice"}])
def test_what_cannot_be_played_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GridWalk(**args)


def test_several_calls_at_once_are_no_move(store: MediaStore) -> None:
    env = GridWalk(actions="tool", max_turns=2)
    one = env.action_format.write(("up",))
    two = Message(role="assistant", tool_calls=one.tool_calls * 2)
    outcome, chat = play(env, store, [two, two])
    assert outcome.parts["malformed"] == 1.0
    assert [m.role for m in chat.seen] == ["user", "tool", "tool"], "each call has a result"
    assert [len(m.images) for m in chat.seen] == [1, 0, 1]
