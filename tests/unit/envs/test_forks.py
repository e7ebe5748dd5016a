"""Forked rollouts: each turn is in the trace once, and has the mean reward of its tries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.algo.algorithm import RolloutBatch, compute_advantages
from sightline.algo.algorithms import load_algorithm
from sightline.algo.credit import GroupRewards, by_rollout, by_siblings, no_std
from sightline.config import AlgorithmConfig
from sightline.envs.forks import Forks, TurnEnvironment
from sightline.envs.protocol import Chat, Messages, Outcome, Task, load_environment
from sightline.errors import ConfigError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import AssistantMessage, user
from sightline.render import Renderer
from sightline.trace import Trace, flatten
from tests.logged_chat import LoggingPolicy, talking

TURNS = 3


@pytest.fixture(scope="module")
def renderer(tiny_model: Path, media: MediaStore) -> Renderer:
    return load_renderer(tiny_model, media)


@dataclass
class Episode:
    said: list[str] = field(default_factory=list)


class Saying(TurnEnvironment):
    """The reward is the fraction of an episode's answers that begin with "a"."""

    name = "saying"
    shows_media = False

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    def start(self, task: Task, chat: Chat) -> tuple[Episode, Messages]:
        return Episode(), [user("say something")]

    def step(self, state: Episode, answer: AssistantMessage, chat: Chat) -> Messages | float:
        state.said.append(answer.text)
        if len(state.said) < TURNS:
            return [user(f"turn {len(state.said)}")]
        return grade(state.said)


def grade(said: list[str]) -> float:
    return sum(text.startswith("a") for text in said) / len(said)


def play(
    renderer: Renderer, store: MediaStore, forks: int, at: str, split: str = "train"
) -> tuple[Trace, Outcome]:
    # Ids of a byte-level tokenizer: "a", "b" and "c".
    sayings = [[64, *renderer.stop_token_ids[:1]], [65, 66, *renderer.stop_token_ids[:1]]]
    policy = LoggingPolicy(sayings, disorder=0.0)
    env = Forks(f"{__name__}:Saying", forks, at)

    async def main() -> tuple[Trace, Outcome]:
        async with talking(policy, renderer, store) as chat:
            outcome = await env.rollout(env.task(0, split), chat)
            trace = chat.trace
            trace.per_turn, trace.reward = outcome.per_turn, outcome.reward
            return trace, outcome

    return asyncio.run(main())


def read_leaves(trace: Trace) -> list[tuple[list[int], float]]:
    """Return the turns of each try, and its reward according to the trace's texts."""
    numbers = {node.id: turn for turn, node in enumerate(trace.turns)}
    leaves = []
    for path in trace.branches():
        nodes = [trace.nodes[n] for n in path if n in numbers]
        leaves.append(([numbers[n.id] for n in nodes], grade([n.message.text for n in nodes])))
    return leaves


@pytest.mark.parametrize("at", ["uncertain", "random", "every"])
@pytest.mark.parametrize("forks", [0, 2, 5])
def test_turn_has_the_mean_reward_of_its_tries(
    renderer: Renderer, media: MediaStore, at: str, forks: int
) -> None:
    trace, outcome = play(renderer, media, forks, at)
    leaves = read_leaves(trace)
    assert len(leaves) == 1 + forks and all(len(turns) == TURNS for turns, _ in leaves)
    assert outcome.reward == pytest.approx(np.mean([reward for _, reward in leaves]))
    means = [
        np.mean([reward for turns, reward in leaves if turn in turns])
        for turn in range(len(trace.turns))
    ]
    assert outcome.per_turn == pytest.approx(means)
    samples = flatten(trace)
    trained = sorted(segment.turn for sample in samples for segment in sample.segments)
    assert trained == list(range(len(trace.turns))), "each turn trains once"
    assert all((sample.turn_origins is None) == (forks == 0) for sample in samples)


def test_forks_begin_at_the_chosen_turns(renderer: Renderer, media: MediaStore) -> None:
    def first_new_turns(at: str) -> list[int]:
        """Return the depth at which each fork leaves the first try."""
        (first, *others) = sorted(
            turns for turns, _ in read_leaves(play(renderer, media, 3, at)[0])
        )
        return sorted(sum(turn in first for turn in turns) for turns in others)

    assert first_new_turns("every") == [0, 1, 2]
    # Each call of this policy is less certain than the one before.
    assert first_new_turns("uncertain") == [0, 1, 2]
    assert len(read_leaves(play(renderer, media, 1, "uncertain")[0])[1][0]) == TURNS
    trace, _ = play(renderer, media, 1, "uncertain")
    assert sorted(turns for turns, _ in read_leaves(trace)) == [[0, 1, 2], [0, 1, 3]]


def test_evaluations_do_not_fork(renderer: Renderer, media: MediaStore) -> None:
    trace, _ = play(renderer, media, 4, "every", split="eval")
    assert len(trace.turns) == TURNS and trace.turn_origins() is None


def test_siblings_are_compared_at_each_fork() -> None:
    """Two rollouts. In the first, turn 2 is another answer to the prompt of turn 1."""
    rewards = (np.array([0.75, 0.5, 1.0]), np.array([0.25, 0.25]))
    origins = ([(0, -1), (2, 0), (2, 0)], None)
    group = GroupRewards(np.array([0.75, 0.25]), (3, 2), rewards, turn_origins=origins)
    first, second = by_siblings(group, no_std)
    assert first.tolist() == [0.25, -0.25, 0.25]
    assert second.tolist() == [-0.25, -0.25], "a turn without siblings continues the one before"


def test_flat_rollouts_have_the_advantages_of_their_rewards() -> None:
    """The reward of each turn is that of its only try."""
    rewards = np.array([1.0, 0.0, 0.5])
    rows = tuple(np.full(num, reward) for num, reward in zip((2, 3, 1), rewards, strict=True))
    group = GroupRewards(rewards, (2, 3, 1), rows)
    for one, other in zip(by_siblings(group, no_std), by_rollout(group, no_std), strict=True):
        assert np.array_equal(one, other)


def test_single_rollout_with_forks_has_a_signal(renderer: Renderer, media: MediaStore) -> None:
    algorithm = load_algorithm(AlgorithmConfig(credit="siblings", advantage="no_std"))
    trace, _ = play(renderer, media, 5, "every")
    batch = RolloutBatch.of(flatten(trace))
    (group,) = batch.groups
    per_turn: Any = by_siblings(group.rewards, no_std)
    assert np.ptp(np.concatenate(per_turn)) > 0 and algorithm.has_signal(group.rewards)
    for sample, row in zip(batch.samples, compute_advantages(algorithm, batch), strict=True):
        expected = sample.expand_turns(per_turn[0])
        assert np.allclose(row, expected)


def test_environment_without_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a TurnEnvironment"):
        load_environment("forks", {"env": "color_codeword"})
    with pytest.raises(ConfigError, match="forks = -1"):
        load_environment("forks", {"env": f"{__name__}:Saying", "forks": -1})
