"""grid_walk: walk to the green field. Each turn shows a picture, and each answer is a move.

The walker is red, the goal is green and walls are dark. A field of the default size is one patch
of the model. A move is one letter (`actions = "text"`) or a call of the tool `move` (`"tool"`).
Invalid answers, and moves into a wall or off the grid, leave the walker in place.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from PIL import Image, ImageDraw

from sightline.envs.drawing import encode_png
from sightline.envs.forks import TurnEnvironment
from sightline.envs.protocol import Chat, Messages, Outcome, Task
from sightline.envs.tools import Toolbox, reply_to_calls
from sightline.errors import ConfigError
from sightline.message import AssistantMessage, Message, ToolCall, assistant

Cell = tuple[int, int]
"""Row and column."""

MOVES: dict[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
WORDS = {"up": "U", "down": "D", "left": "L", "right": "R"}
FLOOR, WALL, GOAL, WALKER = (235, 235, 235), (40, 40, 60), (30, 170, 60), (220, 40, 40)


def move(direction: Literal["up", "down", "left", "right"]) -> None:
    """Moves the red walker one field on the grid."""


@dataclass(frozen=True)
class Maze:
    start: Cell
    goal: Cell
    walls: frozenset[Cell]


@dataclass
class Walk:
    """A walk through a maze, and the number of moves that are left from each field."""

    maze: Maze
    left: dict[Cell, int]
    at: Cell
    per_turn: list[float] = field(default_factory=list)
    num_malformed: int = 0


@dataclass(eq=False)
class GridWalk(TurnEnvironment):
    """A grid of `cells` x `cells` fields, of which `walls` are walls."""

    name = "grid_walk"

    cells: int = 4
    side: int = 64
    walls: int = 0
    max_turns: int = 8
    actions: str = "text"
    hint: str = ""
    malformed_penalty: float = 0.3
    expert_fraction: float = 0.0
    """Fraction of demonstrations that take the shortest path."""
    seed: int = 0

    def __post_init__(self) -> None:
        fields = self.cells * self.cells
        if self.cells < 2 or self.side < 2 * self.cells or not 0 <= self.walls <= fields // 3:
            raise ConfigError(
                f"grid_walk: {self.walls} walls on {self.cells} x {self.cells} fields do not fit "
                f"in {self.side} pixels",
                "take 2 fields a side or more, 2 pixels a field, a third of them walls at the most",
            )
        if self.actions not in ("text", "tool"):
            raise ConfigError(
                f"grid_walk: unknown [env.args] actions = {self.actions!r}", "use 'text' or 'tool'"
            )
        self.toolbox = Toolbox(move)
        self.tools = self.toolbox.schemas if self.actions == "tool" else None

    def task(self, index: int, split: str) -> Task:
        rng = self.task_rng(index, split)
        fields = [(row, column) for row in range(self.cells) for column in range(self.cells)]
        while True:
            start, goal, *walls = rng.sample(fields, 2 + self.walls)
            maze = Maze(start, goal, frozenset(walls))
            if start in self.distances(maze):
                return Task(index, split, maze)

    def start(self, task: Task, chat: Chat) -> tuple[Walk, Messages]:
        walk = Walk(task.data, self.distances(task.data), task.data.start)
        return walk, self.show(walk, None, chat)

    def step(self, state: Walk, answer: AssistantMessage, chat: Chat) -> Messages | float:
        letter = self.read_move(answer)
        before, left = state.at, state.left
        if letter is not None:
            state.at = self.walk(state.maze, before, letter)
        gain = (left[before] - left[state.at]) / left[state.maze.start]
        state.per_turn.append(gain - self.malformed_penalty * (letter is None))
        state.num_malformed += letter is None
        if state.at != state.maze.goal and len(state.per_turn) < self.max_turns:
            return self.show(state, answer, chat)
        # Without malformed answers, the reward is the walked share of the path: 1 at the goal.
        return sum(state.per_turn)

    def show(self, state: Walk, answer: AssistantMessage | None, chat: Chat) -> Messages:
        return reply_to_calls(answer, self.hint, chat.put(self.draw(state.maze, state.at)))

    def fork(self, state: Walk) -> Walk:
        return replace(state, per_turn=[*state.per_turn])

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        walk, messages = self.start(task, chat)
        result: Messages | float = messages
        while not isinstance(result, float):
            result = self.step(walk, await chat.send(result, tools=self.tools), chat)
        return Outcome(
            reward=result,
            parts={
                "reached": float(walk.at == walk.maze.goal),
                "progress": 1 - walk.left[walk.at] / walk.left[walk.maze.start],
                "turns": float(len(walk.per_turn)),
                "malformed": walk.num_malformed / len(walk.per_turn),
            },
            per_turn=walk.per_turn,
        )

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """Walk by random moves, which teach only the format. Some take the shortest path."""
        maze: Maze = task.data
        left = self.distances(maze)
        expert = rng.random() < self.expert_fraction
        at, answer = maze.start, None
        messages: list[Message] = []
        for _ in range(self.max_turns):
            if at == maze.goal:
                break
            moves = list(MOVES)
            if expert:
                moves = [m for m in moves if left[self.walk(maze, at, m)] < left[at]]
            letter = rng.choice(moves)
            messages += reply_to_calls(answer, self.hint, put(self.draw(maze, at)))
            answer = self.write_move(letter)
            messages.append(answer)
            at = self.walk(maze, at, letter)
        return messages

    def read_move(self, answer: AssistantMessage) -> str | None:
        """Return the letter of the move that an answer makes, or None."""
        if self.tools is None:
            return answer.text if answer.text in MOVES and not answer.tool_calls else None
        values = self.toolbox.read(answer)
        return None if values is None else WORDS[values["direction"]]

    def write_move(self, letter: str) -> Message:
        if self.tools is None:
            return assistant(letter)
        word = next(word for word, known in WORDS.items() if known == letter)
        call = ToolCall("move", json.dumps({"direction": word}))
        return Message(role="assistant", tool_calls=(call,))

    def walk(self, maze: Maze, at: Cell, move: str) -> Cell:
        """Return the cell after a move: the same one if a wall or the edge blocks it."""
        to = (at[0] + MOVES[move][0], at[1] + MOVES[move][1])
        inside = all(0 <= place < self.cells for place in to)
        return to if inside and to not in maze.walls else at

    def distances(self, maze: Maze) -> dict[Cell, int]:
        """Return the number of moves to the goal from every field that can reach it."""
        distances = {maze.goal: 0}
        waiting = deque([maze.goal])
        while waiting:
            here = waiting.popleft()
            for move in MOVES:
                there = self.walk(maze, here, move)
                if there not in distances:
                    distances[there] = distances[here] + 1
                    waiting.append(there)
        return distances

    def draw(self, maze: Maze, at: Cell) -> bytes:
        image = Image.new("RGB", (self.side, self.side), FLOOR)
        pen = ImageDraw.Draw(image)
        for cell, colour in (*((wall, WALL) for wall in sorted(maze.walls)), (maze.goal, GOAL)):
            pen.rectangle(self._box(cell), fill=colour)
        pen.rectangle(self._box(at), fill=WALKER)
        return encode_png(image)

    def _box(self, cell: Cell) -> tuple[int, int, int, int]:
        row, column = cell
        edges = [place * self.side // self.cells for place in (column, row, column + 1, row + 1)]
        return edges[0], edges[1], edges[2] - 1, edges[3] - 1
