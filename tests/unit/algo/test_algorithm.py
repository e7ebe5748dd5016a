"""The `Algorithm` seam: groups and turns of a batch, signals, and algorithms from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch, compute_advantages
from sightline.algo.algorithms import GRPO, build_small_batch, load_algorithm
from sightline.algo.credit import GroupRewards
from sightline.algo.losses import LossInputs, check_algorithm_loss, load_loss
from sightline.algo.needs import Needs
from sightline.algo.registry import load_aggregation
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError, Misaligned
from sightline.wire.micro_batch import TokenOrigin
from sightline.wire.sample import Batch, Segment

EQUAL = GroupRewards(np.array([0.5, 0.5]), (1, 1), (None, None))


class Constant(Algorithm):
    """Give every token the advantage `level`."""

    def __init__(self, settings: AlgorithmConfig, level: float = 1.0) -> None:
        super().__init__(settings)
        self.level = level

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        return [np.full(len(sample.trained), self.level) for sample in batch.samples]

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        return AlgorithmLoss(-tokens.advantages * tokens.logprobs, {"twice": 2 * tokens.logprobs})


@pytest.fixture
def theirs() -> Iterator[ModuleType]:
    module = ModuleType("theirs")
    sys.modules["theirs"] = module
    module.Constant = Constant  # type: ignore[attr-defined]
    yield module
    del sys.modules["theirs"]


def test_external_algorithm_needs_one_class_and_one_setting(theirs: ModuleType) -> None:
    algorithm = load_algorithm(AlgorithmConfig(name="theirs:Constant", args={"level": 3.0}))
    assert isinstance(algorithm, Constant) and algorithm.level == 3.0
    check_algorithm_loss("theirs:Constant", algorithm.loss, algorithm.needs)


def test_invalid_algorithm_is_refused_by_its_setting(theirs: ModuleType) -> None:
    class Short(Constant):
        def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
            return super().advantages(batch)[:1]

    class Detached(Constant):
        def loss(self, tokens: LossInputs) -> AlgorithmLoss:
            return AlgorithmLoss(tokens.logprobs.detach(), {})

    class Mean(Constant):
        def loss(self, tokens: LossInputs) -> AlgorithmLoss:
            return AlgorithmLoss(tokens.logprobs, {"mean": tokens.logprobs.mean()})

    theirs.Short = Short  # type: ignore[attr-defined]
    theirs.function = lambda settings: None  # type: ignore[attr-defined]
    for name, problem in {
        "pp": "is not built in",
        "theirs:function": "is not an Algorithm",
        "theirs:Short": "failed on a small batch: Misaligned",
    }.items():
        with pytest.raises(ConfigError, match=rf"^\[algorithm\] name = '{name}'.*{problem}"):
            load_algorithm(AlgorithmConfig(name=name))
    with pytest.raises(ConfigError, match="cannot be built with the arguments"):
        load_algorithm(AlgorithmConfig(name="theirs:Constant", args={"height": 3.0}))
    with pytest.raises(ConfigError, match="uses no teacher"):
        load_algorithm(AlgorithmConfig(teacher="somewhere"))
    for wrong, problem in ((Detached, "has no gradient"), (Mean, "for 6 tokens")):
        with pytest.raises(ConfigError, match=problem):
            check_algorithm_loss("x:y", wrong(AlgorithmConfig()).loss, Needs())


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "dapo", "args": {"max_sampled_tokens": "4"}},
        {"name": "dapo", "args": {"max_sampled_tokens": True}},
        {"loss": "tis", "loss_args": {"ratio_cap": 0}},
        {"aggregation": "constant", "aggregation_args": {"divisor": "a"}},
    ],
)
def test_argument_that_is_not_a_positive_number_is_refused(settings: dict[str, Any]) -> None:
    loaded = AlgorithmConfig(**settings)
    with pytest.raises(ConfigError, match="is out of range"):
        load_algorithm(loaded)
        load_loss(loaded.loss, loaded.loss_args)
        load_aggregation(loaded.aggregation, loaded.aggregation_args)


def test_metric_cannot_have_the_name_of_a_step_metric() -> None:
    class Lost(Constant):
        def loss(self, tokens: LossInputs) -> AlgorithmLoss:
            names = ("loss", "mine", "lr", "seconds.mine")
            return AlgorithmLoss(tokens.logprobs, dict.fromkeys(names, tokens.logprobs))

    with pytest.raises(ConfigError, match=r"metrics \['loss', 'lr', 'seconds.mine'\], which every"):
        check_algorithm_loss("x:y", Lost(AlgorithmConfig()).loss, Needs())


def test_the_orchestrator_can_load_an_algorithm_without_torch() -> None:
    code = (
        "import sys\n"
        "from sightline.algo.algorithms import load_algorithm\n"
        "from sightline.config import AlgorithmConfig\n"
        "load_algorithm(AlgorithmConfig(kl_coef=0.1))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "needs",
    [
        Needs(exact_kl=True), Needs(reference_logprobs=True), Needs(values=True),
        Needs(teacher_logprobs=True),
    ],
)  # fmt: skip
def test_a_reference_a_critic_and_a_teacher_keep_groups_with_equal_rewards(needs: Needs) -> None:
    algorithm = Constant(AlgorithmConfig())
    assert not algorithm.has_signal(EQUAL)
    algorithm.needs = needs
    assert algorithm.has_signal(EQUAL)


def test_turns_with_different_rewards_are_a_signal_for_credit_by_turn() -> None:
    swapped = (np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    group = GroupRewards(np.array([0.5, 0.5]), (2, 2), swapped)
    algorithm = Constant(AlgorithmConfig())
    assert not algorithm.has_signal(group)
    algorithm.needs = Needs(turn_rewards=True)
    assert algorithm.has_signal(group)
    assert not algorithm.has_signal(replace(group, turn_rewards=swapped[:1] * 2))


def test_algorithm_needs_only_the_inputs_it_uses() -> None:
    assert GRPO(AlgorithmConfig(measure_entropy=False)).needs == Needs()
    assert GRPO(AlgorithmConfig(measure_entropy=False, kl_coef=0.1)).needs == Needs(exact_kl=True)
    bonus = GRPO(AlgorithmConfig(entropy_coef=0.1, credit="turn")).needs
    assert bonus == Needs(entropy=True, entropy_gradient=True, turn_rewards=True)


def test_the_entropy_bonus_lowers_the_loss_of_uncertain_tokens() -> None:
    algorithm = GRPO(AlgorithmConfig(entropy_coef=0.5))
    logprobs = torch.zeros(2, requires_grad=True)
    entropy = torch.tensor([0.0, 2.0])
    inputs = LossInputs(
        logprobs, torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.long), entropy=entropy
    )
    token_loss, metrics = algorithm.loss(inputs)
    assert token_loss.tolist() == [0.0, -1.0] and metrics["entropy"] is entropy


def test_advantages_apply_to_the_tokens_of_their_turn() -> None:
    algorithm = GRPO(AlgorithmConfig(advantage="no_std", credit="turn"))
    first, second = compute_advantages(algorithm, build_small_batch(algorithm))
    assert first.tolist() == [-0.25, -0.25, 0.0, 0.0] and second.tolist() == [0.25, 0.25]


def test_rollout_with_two_branches_counts_once() -> None:
    whole, other = build_small_batch(GRPO(AlgorithmConfig())).samples
    branch = msgspec.structs.replace(
        other, trace_id="a", turn_rewards=[0.0, 1.0, 5.0], segments=[Segment(1, 3, node=9, turn=2)]
    )
    samples = [msgspec.structs.replace(whole, turn_rewards=[0.0, 1.0, 5.0]), branch, other]
    [group] = RolloutBatch.of(samples).groups
    assert group.samples == ((0, 1), (2,)) and group.rewards.num_turns == (3, 1)
    assert group.rewards.rewards.tolist() == [1.0, 0.5]
    with pytest.raises(Misaligned, match="has 3 turns, and its samples train turns"):
        RolloutBatch.of(samples[:1])


def test_tokens_carry_their_turn_rollout_and_group() -> None:
    origins = [
        TokenOrigin(0, 2, node=1, turn=0, trace_id="a", group_id="g"),
        TokenOrigin(2, 3, node=3, turn=1, trace_id="a", group_id="g"),
        TokenOrigin(3, 5, node=1, turn=0, trace_id="b", group_id="g"),
    ]
    zeros = torch.zeros(5)
    tokens = LossInputs(zeros, zeros, zeros, zeros.long(), origins)
    assert tokens.segment_ids("turn").tolist() == [0, 0, 1, 0, 0]
    assert tokens.segment_ids("rollout").tolist() == [0, 0, 0, 1, 1]
    assert tokens.segment_ids("group").tolist() == [0] * 5


def test_a_batch_of_schema_1_is_read_with_its_stored_advantages() -> None:
    sample = build_small_batch(GRPO(AlgorithmConfig())).samples[1]
    builtins = msgspec.to_builtins(Batch(3, [sample]), builtin_types=(bytes,))
    old = builtins["samples"][0]
    del old["turn_rewards"]
    old |= {"schema": 1, "advantages": {**old["logprobs"]}}
    data = msgspec.msgpack.encode(builtins | {"schema": 1})
    [read] = Batch.from_bytes(data).samples
    assert read.get_advantages().tolist() == [-0.5, -0.5]
    with pytest.raises(Misaligned, match="no advantages yet"):
        sample.get_advantages()
