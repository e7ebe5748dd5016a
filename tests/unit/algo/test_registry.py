"""Functions of an algorithm: imported by name, checked by signature, tried on a small batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sightline.algo.credit import by_constant, by_rollout, by_samples, by_tokens
from sightline.algo.losses import LOSSES, LossInputs, LossOutput, load_loss, ppo
from sightline.algo.registry import load_advantage, load_aggregation, load_credit, load_filters
from sightline.config import FiltersConfig
from sightline.errors import ConfigError


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A user's module, `theirs`."""
    new_module = ModuleType("theirs")
    sys.modules["theirs"] = new_module
    yield new_module
    del sys.modules["theirs"]


def load(kind: str, name: str) -> Callable[..., Any]:
    return {
        "loss": load_loss,
        "advantage": load_advantage,
        "credit": load_credit,
        "aggregation": load_aggregation,
    }[kind](name)


def test_a_built_in_is_found_by_its_name_and_takes_its_arguments() -> None:
    assert load_loss("ppo") is ppo and load_credit("rollout") is by_rollout
    inputs = LossInputs(*(torch.zeros(1),) * 3, torch.zeros(1, dtype=torch.long))
    for name in LOSSES:
        assert isinstance(load_loss(name)(inputs), LossOutput)
    assert load_aggregation("constant", {"divisor": 4.0})(np.array([2, 3])).tolist() == [0.125] * 2


@pytest.mark.parametrize("kind", ["loss", "advantage", "credit", "aggregation"])
def test_missing_function_is_refused_with_its_setting(kind: str, module: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"^\[\w+\] \w+ = 'nowhere:f': no module named"):
        load(kind, "nowhere:f")
    with pytest.raises(ConfigError, match="theirs has no 'f'"):
        load(kind, "theirs:f")
    module.f = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="is not a function"):
        load(kind, "theirs:f")


def test_unknown_function_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip=") as refused:
        load_loss("ppo", {"clip": 0.2})
    assert "clip_low" in refused.value.fix


def good_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(-inputs.advantages * inputs.logprobs, torch.zeros_like(inputs.logprobs))


BAD_LOSSES = {
    "failed on a small batch: ValueError": lambda inputs: int("x"),
    "for 6 tokens": lambda inputs: (inputs.logprobs.sum(), inputs.logprobs),
    "has no gradient": lambda inputs: (inputs.logprobs.detach(), inputs.logprobs.detach()),
    "is not finite": lambda inputs: (inputs.logprobs / 0.0, inputs.logprobs.detach()),
    "returned": lambda inputs: inputs.logprobs,
}


@pytest.mark.parametrize("problem", BAD_LOSSES)
def test_external_loss_is_tested_at_load(problem: str, module: ModuleType) -> None:
    module.good, module.bad = good_loss, BAD_LOSSES[problem]  # type: ignore[attr-defined]
    assert load_loss("theirs:good") is good_loss
    with pytest.raises(ConfigError, match=problem) as refused:
        load_loss("theirs:bad")
    assert refused.value.problem.startswith(("[algorithm] loss", "the result of [algorithm] loss"))


@pytest.mark.parametrize(
    "bad", [lambda rewards: rewards[:1], lambda rewards: rewards / 0, lambda rewards: [0.0] * 4]
)
@pytest.mark.filterwarnings("ignore:invalid value|divide by zero:RuntimeWarning")
def test_external_advantage_is_tested_at_load(bad: Any, module: ModuleType) -> None:
    module.bad = bad  # type: ignore[attr-defined]
    module.good = lambda rewards, scale=2.0: scale * rewards  # type: ignore[attr-defined]
    advantage = load_advantage("theirs:good", {"scale": 3.0})
    assert advantage(np.array([1.0, 2.0])).tolist() == [3.0, 6.0]
    with pytest.raises(ConfigError, match=r"^\[algorithm\] advantage = 'theirs:bad' returned"):
        load_advantage("theirs:bad")


def test_external_credit_gives_one_advantage_per_turn(module: ModuleType) -> None:
    module.good = lambda group, advantage: [  # type: ignore[attr-defined]
        np.full(num, 1.0) for num in group.num_turns
    ]
    module.bad = lambda group, advantage: [np.ones(1)] * 2  # type: ignore[attr-defined]
    load_credit("theirs:good")
    with pytest.raises(ConfigError, match="for 2 turns"):
        load_credit("theirs:bad")


def test_external_filter_returns_a_verdict_or_none(module: ModuleType) -> None:
    module.good = lambda trace: "short" if trace.num_sampled < 3 else None  # type: ignore[attr-defined]
    module.bad = lambda trace: True  # type: ignore[attr-defined]
    load_filters(FiltersConfig(custom=("theirs:good",)))
    with pytest.raises(ConfigError, match=r"\[filters\] custom: 'theirs:bad' returned True"):
        load_filters(FiltersConfig(custom=("theirs:bad",)))


def test_token_weights_match_hand_computed_values() -> None:
    counts = np.array([3, 0, 5])
    assert by_tokens(counts).tolist() == [1 / 8] * 3
    assert by_samples(counts)[[0, 2]].tolist() == [1 / (2 * 3), 1 / (2 * 5)]
    assert by_constant(counts, divisor=7.0).tolist() == [1 / (2 * 7)] * 3
    assert (by_tokens(counts) * counts).sum() == pytest.approx(1.0)
    assert (by_samples(counts) * counts).sum() == pytest.approx(1.0)
