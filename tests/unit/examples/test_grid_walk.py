from __future__ import annotations

import asyncio
import io
import random
from typing import Any

import pytest
from answering import ScriptedChat
from grid_walk import GOAL, MOVES, WALKER, GridWalk, Maze
from PIL import Image

from sightline.envs import Outcome
from sightline.media import MediaStore


def play(env: GridWalk, store: MediaStore, answers: Any) -> tuple[Outcome, ScriptedChat]:
    chat = ScriptedChat(store, answers)
    return asyncio.run(env.rollout(env.task(0, "train"), chat)), chat


def shortest(env: GridWalk, maze: Maze) -> list[str]:
    """Return the moves of a shortest path."""
    left, at, moves = env.distances(maze), maze.start, []
    while at != maze.goal:
        move = next(m for m in MOVES if left[env.walk(maze, at, m)] < left[at])
        at = env.walk(maze, at, move)
        moves.append(move)
    return moves


def places(env: GridWalk, picture: bytes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Find the cells of walker and goal in the picture."""
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


def test_shortest_path_earns_the_full_reward(store: MediaStore) -> None:
    env = GridWalk(walls=3)
    moves = shortest(env, env.task(0, "train").data)
    outcome, chat = play(env, store, moves)
    assert outcome.reward == pytest.approx(1.0) and outcome.parts["reached"] == 1.0
    assert outcome.per_turn == pytest.approx([1 / len(moves)] * len(moves))
    assert [len(message.images) for message in chat.seen] == [1] * len(moves)
    assert chat.tools == [None] * len(moves)


def test_moves_are_tool_calls_that_return_images(store: MediaStore) -> None:
    env = GridWalk(actions="tool")
    moves = shortest(env, env.task(0, "train").data)
    outcome, chat = play(env, store, [env.write_move(m) for m in moves])
    assert outcome.parts["reached"] == 1.0 and outcome.parts["malformed"] == 0.0
    assert [message.role for message in chat.seen] == ["user"] + ["tool"] * (len(moves) - 1)
    assert all(len(message.images) == 1 for message in chat.seen)
    assert all(tools[0]["function"]["name"] == "move" for tools in chat.tools)


def test_every_task_is_solvable_and_determined_by_split_and_index() -> None:
    env, again = GridWalk(walls=5), GridWalk(walls=5)
    for index in range(100):
        task = env.task(index, "train")
        assert task == again.task(index, "train")
        assert env.distances(task.data)[task.data.start] > 0
    assert [env.task(i, "train").data for i in range(9)] != [
        env.task(i, "eval").data for i in range(9)
    ]


@pytest.mark.parametrize("actions", ["text", "tool"])
def test_demonstrations_parse_and_experts_reach_the_goal(store: MediaStore, actions: str) -> None:
    for share, arrives in ((1.0, True), (0.0, False)):
        env = GridWalk(actions=actions, expert_fraction=share, max_turns=6)
        ends = []
        for i in range(20):
            task = env.task(i, "sft")
            talk = env.demonstration(task, store.put, random.Random(i))
            at = task.data.start
            for message in talk:
                if message.role == "assistant":
                    letter = env.read_move(message)
                    assert letter is not None
                    at = env.walk(task.data, at, letter)
            ends.append(at == task.data.goal)
        assert all(ends) == arrives
