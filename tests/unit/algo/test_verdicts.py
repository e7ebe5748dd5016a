"""Verdicts and credit: one verdict per rollout, advantages against siblings only."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from sightline.algo.algorithm import get_group_rewards
from sightline.algo.algorithms import GRPO, PPO
from sightline.algo.credit import grpo, no_std
from sightline.algo.registry import load_filters
from sightline.algo.verdicts import GroupFilter
from sightline.config import AlgorithmConfig, FiltersConfig
from sightline.errors import EnvironmentFailed, PolicyMismatch
from sightline.message import assistant, user
from sightline.trace import Node, PolicySpan, Trace
from sightline.trace.node import float32_array, int32_array


def trace(
    reward: float | None,
    version: int = 0,
    epoch: int = 0,
    turns: int = 1,
    per_turn: list[float] | None = None,
    error: str = "",
    tokens: list[int] | None = None,
    logprob: float = -1.0,
) -> Trace:
    nodes: list[Node] = []
    for turn in range(turns):
        nodes.append(Node(2 * turn, 2 * turn - 1, user("q"), int32_array([1, 2]), sampled_start=2))
        token_ids = tokens or [5, 6]
        nodes.append(
            Node(
                2 * turn + 1,
                2 * turn,
                assistant("a"),
                int32_array([3, *token_ids]),
                sampled_start=1,
                logprobs=float32_array([logprob] * len(token_ids)),
                versions=(PolicySpan(0, len(token_ids), version=version, epoch=epoch),),
                finish_reason="stop",
            )
        )
    return Trace(id=f"t{reward}", nodes=nodes, reward=reward, per_turn=per_turn, error=error)


def build_filter(
    max_lag: int = 1, credit: str = "rollout", kl_coef: float = 0.0, **filters: object
) -> GroupFilter:
    algorithm = GRPO(AlgorithmConfig(credit=credit, kl_coef=kl_coef))
    return GroupFilter(max_lag, algorithm, load_filters(FiltersConfig.model_validate(filters)))


def verdicts(decided: object) -> list[str]:
    return [verdict for _, verdict in decided.verdicts]  # type: ignore[attr-defined]


def test_a_group_with_different_rewards_trains() -> None:
    decided = build_filter().decide([trace(0.0), trace(1.0)], step=1)
    assert verdicts(decided) == ["train", "train"] and decided.fills_place
    assert len(decided.samples) == 2 and decided.samples[0].advantages is None


def test_equal_rewards_have_no_signal_but_fill_the_batch() -> None:
    decided = build_filter().decide([trace(0.3), trace(0.3)], step=1)
    assert verdicts(decided) == ["no_signal"] * 2
    assert decided.fills_place and not decided.samples


def test_kl_term_keeps_groups_with_equal_rewards() -> None:
    decided = build_filter(kl_coef=0.1).decide([trace(0.3), trace(0.3)], step=1)
    assert verdicts(decided) == ["no_signal"] * 2 and not decided.has_signal
    assert len(decided.samples) == 2


def test_critic_trains_on_equal_rewards_even_with_a_kl_term() -> None:
    decided = GroupFilter(1, PPO(AlgorithmConfig(name="ppo", kl_coef=0.1))).decide(
        [trace(0.3), trace(0.3)], step=1
    )
    assert verdicts(decided) == ["train"] * 2 and decided.has_signal


def test_sample_older_than_the_lag_is_stale_and_replaced() -> None:
    group = [trace(0.0, version=1), trace(1.0, version=1)]
    assert verdicts(build_filter(max_lag=1).decide(group, step=3)) == ["train"] * 2
    late = build_filter(max_lag=1).decide(group, step=4)
    assert verdicts(late) == ["stale"] * 2 and not late.fills_place


def test_sample_of_the_version_that_a_step_makes_ends_the_run() -> None:
    """Step 3 trains version 2. Nothing can have sampled version 3 before it."""
    fresh = build_filter().decide([trace(0.0, version=2), trace(1.0, version=2)], step=3)
    assert verdicts(fresh) == ["train"] * 2 and fresh.lags == [0, 0]
    with pytest.raises(PolicyMismatch, match="version 3, which is newer than version 2"):
        build_filter().decide([trace(0.0, version=3), trace(1.0, version=2)], step=3)


def test_every_version_that_sampled_a_rollout_counts() -> None:
    """A server may adopt a version in the middle of an answer."""

    def group(first: int, last: int) -> list[Trace]:
        spans = (PolicySpan(0, 1, version=first, epoch=0), PolicySpan(1, 2, version=last, epoch=0))
        traces = [trace(0.0), trace(1.0)]
        for record in traces:
            record.nodes[1] = msgspec.structs.replace(record.nodes[1], versions=spans)
        return traces

    trained = build_filter(max_lag=1).decide(group(1, 2), step=3)
    assert verdicts(trained) == ["train"] * 2 and trained.lags == [1, 1]
    assert trained.samples[0].versions.numpy().tolist() == [1, 2]
    assert verdicts(build_filter(max_lag=1).decide(group(1, 2), step=4)) == ["stale"] * 2
    with pytest.raises(PolicyMismatch, match="version 3, which is newer than version 2"):
        build_filter().decide(group(2, 3), step=3)


def test_samples_of_an_old_epoch_are_stale() -> None:
    strict = build_filter()
    strict.epochs[2] = 1
    decided = strict.decide([trace(0.0, 2, epoch=0), trace(1.0, 2, epoch=1)], step=3)
    assert verdicts(decided) == ["stale", "no_signal"]


def test_broken_rollout_drops_only_itself() -> None:
    group = [trace(None, error="boom"), trace(0.0), trace(1.0)]
    decided = build_filter().decide(group, step=1)
    assert verdicts(decided) == ["broken", "train", "train"]


def test_filters_drop_samples_by_name_before_packing() -> None:
    long = trace(0.0, tokens=[1, 2, 3, 4, 5])
    repeated = trace(0.1, tokens=[7, 7, 7])
    rare = trace(0.2, logprob=-20.0)
    group = [long, repeated, rare, trace(0.3), trace(0.9)]
    decided = build_filter(max_sampled_tokens=4, max_repeats=3, min_logprob=-10.0).decide(
        group, step=1
    )
    assert verdicts(decided) == ["too_long", "repetitive", "rare_token", "train", "train"]
    assert len(decided.samples) == 2


def test_credit_by_turn_compares_the_same_turn_of_siblings() -> None:
    group = [trace(0.5, turns=2, per_turn=[1.0, 0.0]), trace(0.5, turns=2, per_turn=[0.0, 0.0])]
    by_turn, by_rollout = (
        GRPO(AlgorithmConfig(advantage="no_std", credit=credit)) for credit in ("turn", "rollout")
    )
    rewards = get_group_rewards(group)
    assert by_turn.turn_advantages(rewards) == [[0.5, 0.0], [-0.5, 0.0]]
    assert by_turn.has_signal(rewards) and not by_rollout.has_signal(rewards)


def test_credit_by_turn_requires_turn_rewards() -> None:
    with pytest.raises(EnvironmentFailed, match="per turn"):
        build_filter(credit="turn").decide([trace(0.0), trace(1.0)], step=1)


def test_advantages_match_plain_loops() -> None:
    rewards = np.random.default_rng(3).random(7)
    mean = math.fsum(rewards) / 7
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / 7)
    for actual, a, b in zip(rewards, grpo(rewards), no_std(rewards), strict=True):
        assert a == pytest.approx((actual - mean) / (deviation + 1e-6), rel=1e-12)
        assert b == pytest.approx(actual - mean, rel=1e-12)


def cut_short(reward: float, turns: int = 1, per_turn: list[float] | None = None) -> Trace:
    record = trace(reward, turns=turns, per_turn=per_turn)
    record.error_kind = "truncated"
    return record


@pytest.mark.parametrize(("counts", "verdict"), [(True, "train"), (False, "truncated")])
def test_setting_decides_whether_truncated_rollouts_train(counts: bool, verdict: str) -> None:
    group_filter = build_filter()
    group_filter.keep_truncated = counts
    decided = group_filter.decide([trace(0.0), trace(1.0), cut_short(0.5)], step=1)
    assert verdicts(decided) == ["train", "train", verdict]
    assert len(decided.samples) == 2 + counts


def test_truncated_rollout_without_turn_or_credit_never_trains() -> None:
    nothing = cut_short(0.0, turns=0)
    decided = build_filter().decide([trace(0.0), trace(1.0), nothing], step=1)
    assert verdicts(decided)[2] == "truncated"
    group = [trace(0.0, per_turn=[0.0]), trace(1.0, per_turn=[1.0]), cut_short(0.0)]
    assert verdicts(build_filter(credit="turn").decide(group, step=1))[2] == "truncated"
    group[2] = cut_short(0.0, per_turn=[0.5])
    assert verdicts(build_filter(credit="turn").decide(group, step=1))[2] == "train"
