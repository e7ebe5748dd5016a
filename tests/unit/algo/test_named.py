"""Every algorithm by name, against small cases worked by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sightline.algo.algorithm import Algorithm, RolloutBatch, compute_advantages
from sightline.algo.algorithms import ALGORITHMS, build_small_batch, load_algorithm
from sightline.algo.credit import GroupRewards, by_constant, rloo
from sightline.algo.losses import LossInputs, check_algorithm_loss, estimate_kl, load_loss
from sightline.algo.needs import Needs
from sightline.algo.registry import load_aggregation
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError, EnvironmentFailed
from sightline.wire.array import Array
from sightline.wire.micro_batch import TokenOrigin
from sightline.wire.sample import Sample, Segment

LOG2 = math.log(2.0)


def build(name: str, **settings: Any) -> Algorithm:
    settings.setdefault("teacher", "teacher" if name == "distill" else "")
    settings.setdefault("args", {"max_sampled_tokens": 100} if name == "dapo" else {})
    return load_algorithm(AlgorithmConfig(name=name, **settings))


def make_sample(
    trace: str, group: str, rewards: Sequence[float], lengths: Sequence[int], turn: int = 0
) -> Sample:
    """Return a sample whose turns have `lengths` sampled tokens, with one prompt token each."""
    segments: list[Segment] = []
    trained: list[int] = []
    at = 0
    for i, length in enumerate(lengths):
        segments.append(Segment(at + 1, at + 1 + length, node=turn + i, turn=turn + i))
        trained += range(at + 1, at + 1 + length)
        at += 1 + length
    return Sample(
        trace_id=trace,
        group_id=group,
        env="env",
        reward=sum(rewards),
        token_ids=Array.of(range(at), "int32"),
        trained=Array.of(trained, "int32"),
        logprobs=Array.of([-1.0] * len(trained), "float32"),
        versions=Array.of([0] * len(trained), "int32"),
        segments=segments,
        items=[],
        slots=[],
        turn_rewards=list(rewards),
    )


def make_batch(rewards: Mapping[str, Sequence[float]], tokens: int = 2) -> RolloutBatch:
    """Return a batch with one turn of `tokens` tokens per rollout; rewards are by group."""
    return RolloutBatch.of(
        [
            make_sample(f"{group}{i}", group, [reward], [tokens])
            for group, row in rewards.items()
            for i, reward in enumerate(row)
        ]
    )


def make_inputs(
    ratios: Sequence[float], advantages: Sequence[float], lengths: Sequence[int] | None = None
) -> LossInputs:
    """Return tokens with importance ratios. Turns have `lengths`, and all are of one sample."""
    lengths = lengths or [1] * len(ratios)
    starts = np.cumsum([0, *lengths]).tolist()
    return LossInputs(
        torch.tensor(ratios).log().requires_grad_(),
        torch.zeros(len(ratios)),
        torch.tensor(advantages),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        [
            TokenOrigin(a, b, node=i, turn=i, trace_id="t")
            for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))
        ],
    )


def gradients(name: str, inputs: LossInputs, **args: Any) -> tuple[list[float], list[float]]:
    """Return d loss / d log pi of each token, and which tokens count as clipped."""
    token_loss, clipped = load_loss(name, args)(inputs)
    [gradient] = torch.autograd.grad(token_loss.sum(), inputs.logprobs)
    return gradient.tolist(), clipped.tolist()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_name_loads_and_computes_a_loss(name: str) -> None:
    algorithm = build(name)
    batch = build_small_batch(algorithm)
    assert [len(row) for row in compute_advantages(algorithm, batch)] == [4, 2]
    check_algorithm_loss(name, algorithm.loss, algorithm.needs)


GRADIENTS = {
    # Rewards 3, 0, 0 in the first group, so A = (sqrt 2, -1 / sqrt 2, -1 / sqrt 2). A = 0 in the
    # second. PPO keeps r = 0.5 if A > 0, and r = 2.5 if A < 0. There are 7 tokens.
    "grpo": [0, -0.70711 / 7, 1.76777 / 7, 0, 0.70711 / 7, 0, 0],
    # A = (2, -1, -1). Each token weighs 1 / (5 samples x 1024).
    "dr_grpo": [0, -1 / 5120, 2.5 / 5120, 0, 1 / 5120, 0, 0],
    # A rollout of two tokens loses 1: rewards 2, -1, 0 with mean 1/3 and deviation 1.247219.
    "dapo": [0, -0.668153 / 7, 2.672612 / 7, 0, 0.267261 / 7, 0, 0],
    # A = 3 - 0 and 0 - 3/2. TIS truncates r = 2.5 at 2.
    "rloo": [-6 / 7, -1.5 / 7, 3 / 7, 0.75 / 7, 1.5 / 7, 0, 0],
    # The mean of all five rewards is 1, and their deviation sqrt(6/5): A = 1.825742 and -0.912871.
    "reinforce++": [0, -0.912871 / 7, 2.282177 / 7, 0, 0.912871 / 7, 0, 0],
    # Values are 0.5, so A = (2.5, -0.5, -0.5) and (0.5, 0.5).
    "ppo": [0, -1.25 / 7, 1.25 / 7, 0, 0.5 / 7, -0.5 / 7, -0.5 / 7],
    # s = sqrt(2.5 x 0.5) = 1.118034 is clipped if A > 0. Weights are 1 / (5 samples x length).
    "gspo": [0, 0, 0.790569 / 10, 0.790569 / 10, 0.70711 / 5, 0, 0],
    # r is clipped to 1.28 and 0.8, and every token keeps a gradient.
    "cispo": [-1.810193 / 7, -1.131371 / 7, 0.905097 / 7, 0.565685 / 7, 0.70711 / 7, 0, 0],
    # 4 g (1 - g) r A, with g = sigmoid(T (r - 1)), T = 1 if A > 0, else 1.05.
    "sapo": [-2.109250 / 10, -0.664691 / 10, 1.004736 / 10, 0.330268 / 10, 0.70711 / 5, 0, 0],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_of_a_named_algorithm_is_that_of_its_formula(name: str) -> None:
    """From rewards to d loss / d log pi, with advantage, loss and aggregation as named."""
    lengths = {"g": ([3.0, 0.0, 0.0], [2, 2, 1]), "h": ([1.0, 1.0], [1, 1])}
    samples = [
        make_sample(f"{group}{i}", group, [reward], [length])
        for group, (rewards, numbers) in lengths.items()
        for i, (reward, length) in enumerate(zip(rewards, numbers, strict=True))
    ]
    batch = with_values(samples, [[0.5] * len(sample.trained) for sample in samples])
    args = {"max_sampled_tokens": 2, "buffer": 1} if name == "dapo" else {}
    algorithm = build(name, measure_entropy=False, args=args)
    settings = algorithm.settings
    advantages = compute_advantages(algorithm, batch)
    ratios, numbers = [2.5, 0.5, 2.5, 0.5, 1.0, 1.0, 1.0], [2, 2, 1, 1, 1]
    values = torch.full((7,), 0.5, requires_grad=True) if algorithm.needs.values else None
    inputs = replace(
        make_inputs(ratios, np.concatenate(advantages).tolist(), numbers),
        values=values,
        old_values=values,
    )
    aggregate = load_aggregation(settings.aggregation, settings.aggregation_args)
    weights = torch.from_numpy(np.repeat(aggregate(np.array(numbers)), numbers))
    total = (algorithm.loss(inputs).token_loss * weights).sum()
    [gradient] = torch.autograd.grad(total, inputs.logprobs)
    assert gradient.tolist() == pytest.approx(GRADIENTS[name], rel=1e-4, abs=1e-7)


def test_a_name_changes_defaults_and_explicit_settings_win() -> None:
    assert AlgorithmConfig(name="dr_grpo").advantage == "no_std"
    assert AlgorithmConfig(name="gspo").loss == "gspo"
    chosen = AlgorithmConfig(name="dr_grpo", aggregation_args={"divisor": 4.0})
    assert chosen.aggregation_args == {"divisor": 4.0} and chosen.aggregation == "constant"
    assert AlgorithmConfig(name="sapo", loss="ppo").loss == "ppo"
    assert AlgorithmConfig.model_validate(chosen.model_dump()) == chosen


def test_dr_grpo_weighs_by_a_constant_and_divides_by_no_deviation() -> None:
    advantages = build("dr_grpo").advantages(make_batch({"g": [1.0, 0.0, 0.0, 0.0]}))
    assert [row.tolist() for row in advantages] == [[0.75] * 2, *[[-0.25] * 2] * 3]
    # Two samples train, and every token weighs 1 / (2 x 10), whatever its answer's length.
    assert by_constant(np.array([3, 7, 0]), divisor=10.0).tolist() == [0.05] * 3


def test_rloo_compares_with_the_other_rollouts() -> None:
    assert rloo(np.array([1.0, 0.0, 0.5])).tolist() == pytest.approx([0.75, -0.75, 0.0])
    advantages = build("rloo").advantages(make_batch({"g": [1.0, 0.0]}))
    assert [row[0] for row in advantages] == [1.0, -1.0]


def test_dapo_takes_reward_off_rollouts_that_are_almost_too_long() -> None:
    lengths = {"a": 4, "b": 6, "c": 8, "d": 9}
    batch = RolloutBatch.of([make_sample(n, "g", [1.0], [k]) for n, k in lengths.items()])
    args = {"max_sampled_tokens": 8, "buffer": 4}
    advantages = build("dapo", args=args, advantage="no_std").advantages(batch)
    # Penalties 0, 1/2, 1 and 1, with mean 5/8.
    assert [row[0] for row in advantages] == pytest.approx([0.625, 0.125, -0.375, -0.375])
    with pytest.raises(ConfigError, match="buffer = 9"):
        build("dapo", args={"max_sampled_tokens": 8, "buffer": 9})
    # By default, the penalty begins at four fifths of the limit, as in the paper.
    default = build("dapo", args={"max_sampled_tokens": 10}, advantage="no_std").advantages(batch)
    assert [row[0] for row in default] == pytest.approx([0.125, 0.125, 0.125, -0.375])


def test_dapo_selects_groups_by_the_rewards_without_the_penalty() -> None:
    """The paper keeps groups whose answers are neither all right nor all wrong."""
    dapo = build("dapo", args={"max_sampled_tokens": 8, "buffer": 4})
    group = GroupRewards(np.ones(2), (1, 1), (None, None), "env", (4, 8))
    assert not dapo.has_signal(group)
    assert dapo.has_signal(replace(group, rewards=np.array([0.0, 1.0])))


def test_dapo_needs_a_length_limit() -> None:
    for args in ({}, {"buffer": 4}, {"max_sampled_tokens": 0}):
        with pytest.raises(ConfigError, match="needs args.max_sampled_tokens"):
            build("dapo", args=args)


def test_dapo_trains_a_rising_token_up_to_its_higher_bound() -> None:
    gradient, clipped = gradients("ppo", make_inputs([1.25, 1.3, 0.75], [1.0, 1.0, -1.0]))
    assert gradient == pytest.approx([-1.25, 0.0, 0.0]) and clipped == [0.0, 1.0, 1.0]


def test_reinforce_plus_plus_divides_by_the_deviation_of_the_batch() -> None:
    batch = make_batch({"g": [1.0, 1.0], "h": [0.0, 1.0]})
    by_batch = build("reinforce++").advantages(batch)
    deviation = np.std([1, 1, 0, 1])
    assert [row[0] for row in by_batch] == pytest.approx(
        [0.25 / deviation, 0.25 / deviation, -0.75 / deviation, 0.25 / deviation], rel=1e-4
    )
    by_group = build("reinforce++", args={"baseline": "group"}).advantages(batch)
    deviation = np.std([0, 0, -0.5, 0.5])
    assert [row[0] for row in by_group] == pytest.approx(
        [0.0, 0.0, -0.5 / deviation, 0.5 / deviation], rel=1e-4
    )
    equal = GroupRewards(np.ones(2), (1, 1), (None, None))
    assert build("reinforce++").has_signal(equal)
    assert not build("reinforce++", args={"baseline": "group"}).has_signal(equal)


def with_values(samples: Sequence[Sample], values: Sequence[Sequence[float]]) -> RolloutBatch:
    return replace(RolloutBatch.of(samples), values=[np.array(row) for row in values])


def test_ppo_estimates_advantages_over_tokens() -> None:
    sample = make_sample("a", "g", [0.0, 1.0], [1, 2])
    batch = with_values([sample], [[0.5, 0.25, 0.5]])
    algorithm = build("ppo", args={"gamma": 0.5, "gae_lambda": 0.5})
    # delta = (0.5*0.25 - 0.5, 0.5*0.5 - 0.25, 1 - 0.5) = (-0.375, 0, 0.5), decay 0.25
    assert algorithm.advantages(batch)[0].tolist() == [-0.375 + 0.25 * 0.125, 0.125, 0.5]


def test_ppo_estimates_advantages_over_turns_with_their_rewards() -> None:
    sample = make_sample("a", "g", [2.0, 1.0], [2, 3])
    batch = with_values([sample], [[0.5, 9.0, 0.25, 9.0, 9.0]])
    args = {"level": "turn", "gae_lambda": 0.5}
    [advantages] = build("ppo", args=args, credit="turn").advantages(batch)
    # delta = (2 + 0.25 - 0.5, 1 - 0.25) = (1.75, 0.75)
    assert advantages.tolist() == [2.125] * 2 + [0.75] * 3
    [advantages] = build("ppo", args=args).advantages(batch)  # the whole reward at the end
    assert advantages.tolist() == [-0.25 + 0.5 * 2.75] * 2 + [2.75] * 3
    silent = msgspec.structs.replace(sample, turn_rewards=None)
    with pytest.raises(EnvironmentFailed, match="no reward per turn"):
        build("ppo", credit="turn").advantages(with_values([silent], [[0.0] * 5]))


def test_ppo_follows_a_rollout_across_samples_and_lost_tokens() -> None:
    """Without discounts, the advantage of a token is the reward that follows less its value."""
    nan = math.nan
    first = make_sample("a", "g", [1.0, 2.0, 4.0], [2])
    last = make_sample("a", "g", [1.0, 2.0, 4.0], [2], turn=2)
    lost = make_sample("a", "g", [1.0, 2.0, 4.0], [1], turn=1)
    batch = with_values([last, lost, first], [[0.5, 0.25], [nan], [0.0, 0.125]])
    algorithm = build("ppo", credit="turn")
    after, skipped, before = algorithm.advantages(batch)
    assert after.tolist() == [3.5, 3.75] and before.tolist() == [7.0, 6.875]
    assert skipped.tolist() == [0.0]  # does not train


def test_ppo_moves_values_towards_the_returns_at_the_level_of_its_advantages() -> None:
    values = torch.tensor([0.25, 7.0, 0.0], requires_grad=True)
    inputs = replace(
        make_inputs([1.0] * 3, [0.5, 0.5, 1.0], lengths=[2, 1]),
        values=values,
        old_values=torch.tensor([0.25, 7.0, 0.0]),
    )
    expected = {"token": [-0.5, -0.5, -1.0], "turn": [-0.5, 0.0, -1.0]}
    for level, wanted in expected.items():
        algorithm = build("ppo", args={"level": level}, measure_entropy=False)
        token_loss, metrics = algorithm.loss(inputs)
        [gradient] = torch.autograd.grad(token_loss.sum(), values, retain_graph=True)
        # d/dV 0.5 (V - R)^2 = V - R, and the return R is A + V.
        assert gradient.tolist() == wanted
        [gradient] = torch.autograd.grad(token_loss.sum(), inputs.logprobs)
        assert gradient.tolist() == [-0.5, -0.5, -1.0]
        assert set(metrics) == {"clip_fraction", "value_loss"}


@pytest.mark.parametrize("change", [{"args": {"level": "sample"}}, {"credit": "theirs:credit"}])
def test_ppo_refuses_settings_it_does_not_follow(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not work with PPO"):
        build("ppo", **change)


def test_gspo_moves_all_tokens_of_a_call_by_one_ratio() -> None:
    inputs = make_inputs([4.0, 1.0, 1.0], [1.0, 1.0, 1.0], lengths=[2, 1])
    gradient, clipped = gradients("gspo", inputs, clip_low=0.5, clip_high=1.5)
    assert gradient == pytest.approx([-2.0, -2.0, -1.0]) and clipped == [0.0] * 3


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    gradient, clipped = gradients("cispo", make_inputs([2.0, 1.0, 0.5], [1.0, 1.0, -1.0]))
    assert gradient == pytest.approx([-1.28, -1.0, 0.8]) and clipped == [1.0, 0.0, 1.0]


def test_sapo_has_the_plain_gradient_on_policy_and_fades_away_from_it() -> None:
    gradient, halved = gradients("sapo", make_inputs([1.0, 1.0, 4.0], [2.0, -2.0, 1.0]))
    gate = 1 / (1 + math.exp(-3.0))
    assert gradient == pytest.approx([-2.0, 2.0, -4 * gate * (1 - gate) * 4.0], rel=1e-5)
    assert halved == [0.0, 0.0, 1.0]


RATIOS, LENGTHS = [2.0, 2.0, 0.25], [2, 1]
LEVELS = {"token": [2.0, 2.0, 0.25], "turn": [4.0, 4.0, 0.25], "sample": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_are_truncated_or_masked_at_their_level(level: str) -> None:
    inputs = make_inputs(RATIOS, [1.0, 1.0, 1.0], LENGTHS)
    truncated, _ = gradients("tis", inputs, ratio_cap=3.0, level=level)
    assert truncated == pytest.approx([-min(r, 3.0) for r in LEVELS[level]])
    masked, dropped = gradients("mis", inputs, low=0.5, high=3.0, level=level)
    inside = [0.5 <= r <= 3.0 for r in LEVELS[level]]
    assert masked == pytest.approx(
        [-r if kept else 0.0 for r, kept in zip(LEVELS[level], inside, strict=True)]
    )
    assert dropped == [float(not kept) for kept in inside]


CORRECTED = {  # w = old / mu = (4, 0.25, 1) by token, and (1, 1, 1) over the turn of two tokens
    ("tis", "token"): [2.0, 0.25, 1.0],
    ("mis", "token"): [0.0, 0.0, 1.0],
    ("tis", "turn"): [1.0, 1.0, 1.0],
    ("mis", "sample"): [1.0, 1.0, 1.0],
}


@pytest.mark.parametrize(("kind", "level"), CORRECTED)
def test_correction_weighs_a_loss_by_the_ratio_of_old_policy_and_sampler(
    kind: str, level: str
) -> None:
    """Decoupled PPO clips r = pi / old = (1.5, 1.25, 0.5) at 1.28, whatever the sampler is."""
    inputs = make_inputs([6.0, 0.3125, 0.5], [1.0, 1.0, -1.0], lengths=[2, 1])
    inputs = replace(inputs, old_logprobs=torch.tensor([4.0, 0.25, 1.0]).log())
    args = {"correction": kind, "correction_level": level}
    gradient, clipped = gradients("ppo", inputs, **args)
    weights = CORRECTED[kind, level]
    assert gradient == pytest.approx([0.0, -1.25 * weights[1], 0.0])
    assert clipped == [float(weights[0] > 0), 0.0, 1.0]
    free, _ = gradients("ppo", inputs, clip_low=9.0, clip_high=9.0, **args)
    plain = [-1.5 * weights[0], -1.25 * weights[1], 0.5 * weights[2]]
    assert free == pytest.approx(plain)
    # One ratio for the turn: s = sqrt(1.5 * 1.25).
    by_turn, _ = gradients("gspo", inputs, clip_low=9.0, clip_high=9.0, **args)
    s = math.sqrt(1.875)
    assert by_turn == pytest.approx([-s * weights[0], -s * weights[1], 0.5 * weights[2]])


@pytest.mark.parametrize(
    "args",
    [
        {"correction": "clip"},
        {"correction": "tis", "correction_cap": 0.5},
        {"correction": "tis", "correction_level": "rollout"},
        {"correction": "tis", "correction_size": 2.0},
        {"correction_cap": 2.0},
    ],
)
def test_invalid_correction_is_refused_at_load(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="correction|level = 'rollout'"):
        load_loss("ppo", args)


def test_correction_needs_the_logprobs_from_before_the_update() -> None:
    algorithm = build("grpo", loss_args={"correction": "mis"}, measure_entropy=False)
    assert algorithm.needs == Needs(old_logprobs=True)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="level = \"rollout\"|level = 'rollout'"):
        load_loss("tis", {"level": "rollout"})(make_inputs([1.0], [1.0]))


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_kl_estimators_have_the_gradients_that_they_promise(name: str) -> None:
    """Summed over a vocabulary of two, weighed by pi."""
    logits = torch.tensor([0.3, -0.2], requires_grad=True)
    log_p = torch.log_softmax(logits, 0)
    log_q = torch.log_softmax(torch.tensor([-0.5, 0.4]), 0)
    estimate = (log_p.exp().detach() * estimate_kl(log_p, log_q, name)).sum()
    reverse, forward = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    wanted = reverse if name == "k2" else forward
    torch.testing.assert_close(
        torch.autograd.grad(estimate, logits, retain_graph=True),
        torch.autograd.grad(wanted, logits),
    )
    if name == "k3":
        assert estimate.item() == pytest.approx(reverse.item(), rel=1e-6)


def test_the_kl_term_uses_its_estimator() -> None:
    assert build("grpo", kl_coef=0.5, measure_entropy=False).needs == Needs(exact_kl=True)
    algorithm = build("grpo", kl_coef=0.5, kl_estimator="k2", measure_entropy=False)
    assert algorithm.needs == Needs(reference_logprobs=True)
    inputs = replace(make_inputs([1.0], [0.0]), reference_logprobs=torch.tensor([-2.0]))
    token_loss, metrics = algorithm.loss(inputs)
    assert metrics["kl_ref"].tolist() == [2.0] and token_loss.tolist() == [1.0]


def test_distillation_rewards_tokens_that_the_teacher_finds_likelier() -> None:
    batch = make_batch({"g": [1.0, 0.0]}, tokens=1)
    teacher = [np.array([-1.0 + LOG2]), np.array([-1.0 - LOG2])]
    batch = replace(batch, teacher_logprobs=teacher)
    alone = build("distill").advantages(batch)
    assert [row[0] for row in alone] == pytest.approx([LOG2, -LOG2], rel=1e-6)
    args = {"teacher_coef": 0.5, "reward_coef": 2.0}
    mixed = build("distill", args=args, advantage="no_std").advantages(batch)
    assert [row[0] for row in mixed] == pytest.approx([LOG2 / 2 + 1, -LOG2 / 2 - 1], rel=1e-6)
    with pytest.raises(ConfigError, match="needs a teacher"):
        build("distill", teacher="")


def test_dpo_has_the_gradient_of_its_loss_on_the_best_and_worst_rollout() -> None:
    rewards = {"g": [0.5, 1.0, 0.0], "equal": [1.0, 1.0]}
    batch = make_batch(rewards, tokens=2)
    policy = [torch.tensor([-1.0, -0.5 - i], requires_grad=True) for i in range(5)]
    ref = [torch.tensor([-1.25, -0.25 * i]) for i in range(5)]
    batch = replace(
        batch,
        policy_logprobs=[p.detach().numpy() for p in policy],
        teacher_logprobs=[r.numpy() for r in ref],
    )
    algorithm = build("dpo", args={"beta": 0.5})
    advantages = algorithm.advantages(batch)
    gains = [(p - r).sum() for p, r in zip(policy, ref, strict=True)]
    loss = -torch.nn.functional.logsigmoid(0.5 * (gains[1] - gains[2]))
    wanted = torch.autograd.grad(loss, policy, allow_unused=True)
    for row, gradient, logprobs in zip(advantages, wanted, policy, strict=True):
        expected = torch.zeros(2) if gradient is None else gradient
        inputs = replace(
            make_inputs([1.0] * 2, row.tolist()), logprobs=logprobs, advantages=torch.tensor(row)
        )
        token_loss, metrics = algorithm.loss(inputs)
        [got] = torch.autograd.grad(token_loss.sum(), logprobs)
        torch.testing.assert_close(got.double(), expected.double())
        if gradient is None:
            assert all(numbers.isnan().all() for numbers in metrics.values())
        else:
            assert metrics["dpo_loss"].tolist() == pytest.approx([loss.item()] * 2, rel=1e-6)
            assert metrics["preference_accuracy"].tolist() == [float(gains[1] > gains[2])] * 2
    assert not algorithm.has_signal(GroupRewards(np.ones(2), (1, 1), (None, None)))


def test_dpo_trains_no_half_of_a_pair() -> None:
    batch = make_batch({"g": [1.0, 0.0]})
    logprobs = [np.array([-1.0, -1.0]), np.array([math.nan, math.nan])]
    batch = replace(batch, policy_logprobs=logprobs, teacher_logprobs=[np.zeros(2)] * 2)
    assert [row.tolist() for row in build("dpo").advantages(batch)] == [[0.0, 0.0]] * 2
    cut = [logprobs[0], np.array([-1.0, math.nan])]  # the rest of a cut sample does not train
    batch = replace(batch, policy_logprobs=cut)
    assert all(row.all() for row in build("dpo").advantages(batch))
    with pytest.raises(ConfigError, match="epochs = 2 does not work with 'dpo'"):
        build("dpo", epochs=2)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("dpo", "loss", "cispo"),
        ("dpo", "credit", "turn"),
        ("ppo", "advantage", "rloo"),
        ("reinforce++", "advantage", "no_std"),
        ("reinforce++", "credit", "turn"),
        ("dapo", "credit", "turn"),
    ],
)
def test_a_setting_without_effect_is_refused(name: str, setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = '{value}' does not work with"):
        build(name, **{setting: value})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dpo", {"args": {"beta": 0}}),
        ("dpo", {"args": {"beta": -1}}),
        ("ppo", {"args": {"value_coef": -1}}),
        ("ppo", {"args": {"gamma": float("nan")}}),
        ("grpo", {"advantage_args": {"epsilon": -1}}),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set a positive number"):
        build(name, **settings)
    with pytest.raises(ConfigError, match="ratio_cap = -1"):
        load_loss("tis", {"ratio_cap": -1})
    with pytest.raises(ConfigError, match="divisor = 0"):
        load_aggregation("constant", {"divisor": 0})
