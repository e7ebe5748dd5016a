"""A step with an algorithm: advantages, updates, values and teachers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest
import torch

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch
from sightline.algo.algorithms import load_algorithm
from sightline.algo.losses import LossInputs
from sightline.algo.needs import Needs
from sightline.compute.weights import check_parameters
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.export import export_checkpoint
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.lora import plain_parameters
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.snapshot import ShardReader, restore_model, take_snapshot
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample


class Critic(Algorithm):
    """Computes values with one linear layer, and keeps the batches that it receives."""

    needs = Needs(values=True)

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.batches: list[RolloutBatch] = []
        self.tokens: list[LossInputs] = []

    def build_value_head(self, hidden_size: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(hidden_size, 1), torch.nn.Flatten(0))

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        self.batches.append(batch)
        assert batch.values is not None
        return [s.reward - v for s, v in zip(batch.samples, batch.values, strict=True)]

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        self.tokens.append(tokens)
        assert tokens.values is not None
        error = (tokens.values - 0.5) ** 2
        return AlgorithmLoss(-tokens.advantages * tokens.logprobs + error, {"value_loss": error})


class Student(Critic):
    """Advantages from a teacher's logprobs."""

    needs = Needs(teacher_logprobs=True)

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        self.batches.append(batch)
        assert batch.teacher_logprobs is not None and batch.values is None
        return list(batch.teacher_logprobs)

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        self.tokens.append(tokens)
        return AlgorithmLoss(-tokens.advantages * tokens.logprobs, {})


def build(model: Path, store: MediaStore, algorithm: Algorithm, **trainer: Any) -> Learner:
    settings = making.model_config(model), making.trainer_config(**trainer)
    return making.build_learner(*settings, store, steps=10, algorithm=algorithm)


def without_advantages(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples as the orchestrator writes them, without advantages."""
    return [
        msgspec.structs.replace(
            sample,
            advantages=None,
            segments=[
                msgspec.structs.replace(segment, turn=turn)
                for turn, segment in enumerate(sample.segments)
            ],
        )
        for sample in samples
    ]


def prepare(
    learner: Learner, store: MediaStore, samples: list[Sample], limit: int = 160, **options: Any
) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    settings = learner.algorithm.settings
    preparer = BatchPreparer(
        MicroBatchPixels(materializer), PackSize(limit, 4096), BadMediaPolicy(max_bad_fraction=1.0),
        algorithm=learner.algorithm, num_minibatches=settings.minibatches, **options,
    )  # fmt: skip
    return preparer.prepare(Batch(1, samples), "")


def advantages_by_trace(ready: ReadyBatch) -> dict[str, list[float]]:
    by_trace: dict[str, list[float]] = {}
    for micro_batch in ready.micro_batches:
        advantages = micro_batch.batch.advantages.numpy()
        for origin in micro_batch.batch.origins:
            by_trace.setdefault(origin.trace_id, []).extend(advantages[origin.start : origin.stop])
    return by_trace


@pytest.mark.parametrize("cost", ["image", "length"])
def test_lost_sample_does_not_change_its_siblings_baseline(
    tiny_model: Path, store: MediaStore, cost: str
) -> None:
    samples = without_advantages(making.samples(tiny_model, store, count=4, seed=1))
    learner = build(tiny_model, store, making.algorithm())
    whole = advantages_by_trace(prepare(learner, store, samples))
    assert len(whole) == 4 and len({tuple(row[:1]) for row in whole.values()}) == 4
    if cost == "image":
        digest = next(sample for sample in samples if sample.items).items[0].ref.digest
        store.path(digest).unlink()
        ready = prepare(learner, store, samples)
        assert ready.dropped
    else:
        longest = max(len(sample.token_ids) for sample in samples)
        ready = prepare(learner, store, samples, max_sequence_tokens=longest // 2)
        assert ready.truncated
    left = advantages_by_trace(ready)
    assert 0 < sum(map(len, left.values())) < sum(map(len, whole.values()))
    for trace_id, row in left.items():
        assert row == whole[trace_id][: len(row)]


def test_stored_advantages_are_used_unchanged(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=3, seed=1)
    learner = build(tiny_model, store, making.algorithm())
    advantages = advantages_by_trace(prepare(learner, store, samples))
    assert advantages == {s.trace_id: s.get_advantages().tolist() for s in samples}


def run_step(
    model: Path, store: MediaStore, epochs: int, minibatches: int, exact: bool = False
) -> tuple[Any, Learner]:
    algorithm = making.algorithm(epochs=epochs, minibatches=minibatches, advantage="no_std")
    learner = build(model, store, algorithm)
    samples = without_advantages(making.samples(model, store, count=12, seed=2))
    ready = prepare(learner, store, samples)
    assert len(ready.minibatches) == minibatches and len(ready.micro_batches) >= 3
    return learner.step(ready), learner


def logprobs_of(result: Any) -> dict[tuple[str, int], list[float]]:
    numbers = result.scores.logprobs.numpy()
    return {(o.trace_id, o.node): numbers[o.start : o.stop] for o in result.scores.origins}


@pytest.mark.parametrize(("epochs", "minibatches"), [(2, 1), (1, 3), (2, 3)])
def test_scores_are_computed_before_the_first_update(
    tiny_model: Path, store: MediaStore, epochs: int, minibatches: int
) -> None:
    single, once = run_step(tiny_model, store, 1, 1)
    several, often = run_step(tiny_model, store, epochs, minibatches)
    wanted, logprobs = logprobs_of(single), logprobs_of(several)
    assert wanted.keys() == logprobs.keys()
    for key, row in wanted.items():
        np.testing.assert_allclose(logprobs[key], row, atol=2e-5)
    assert several.metrics["mismatch_kl"] == pytest.approx(single.metrics["mismatch_kl"], rel=1e-4)
    assert several.metrics["trained_tokens"] == single.metrics["trained_tokens"]
    assert several.metrics["tokens"] > 0 and several.metrics["entropy"] is not None
    counts = [next(iter(x.optimizer.state.values()))["step"] for x in (once, often)]
    assert counts == [1, epochs * minibatches]
    weights = [next(iter(x.forward.model.parameters())) for x in (once, often)]
    assert not torch.equal(*weights)


class Old(Critic):
    """Records the logprobs from before the update."""

    needs = Needs(old_logprobs=True)

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        return [np.ones(len(sample.trained)) for sample in batch.samples]

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        self.tokens.append(tokens)
        return AlgorithmLoss(-tokens.logprobs, {})


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 1), (1, 3)])
def test_old_logprobs_are_those_before_the_first_update(
    tiny_model: Path, store: MediaStore, epochs: int, minibatches: int
) -> None:
    algorithm = Old(AlgorithmConfig(epochs=epochs, minibatches=minibatches))
    learner = build(tiny_model, store, algorithm)
    samples = without_advantages(making.samples(tiny_model, store, count=12, seed=2))
    ready = prepare(learner, store, samples)
    result = logprobs_of(learner.step(ready))
    num_updated = 0
    for tokens in algorithm.tokens:
        assert tokens.old_logprobs is not None and not tokens.old_logprobs.requires_grad
        for o in tokens.origins:
            old = tokens.old_logprobs[o.start : o.stop].numpy()
            np.testing.assert_allclose(old, result[o.trace_id, o.node], atol=2e-5)
        num_updated += not torch.allclose(tokens.old_logprobs, tokens.logprobs, atol=1e-3)
    assert (num_updated > 0) == (epochs * minibatches > 1)


def test_corrected_ppo_with_one_update_is_truncated_importance_sampling(
    tiny_model: Path, store: MediaStore
) -> None:
    samples = without_advantages(making.samples(tiny_model, store, count=6, seed=2))
    weights = []
    for settings in ({"loss_args": {"correction": "tis"}}, {"loss": "tis", "loss_args": {}}):
        learner = build(tiny_model, store, making.algorithm(advantage="no_std", **settings))
        learner.step(prepare(learner, store, samples))
        weights.append([p.detach() for p in learner.forward.model.parameters()])
    torch.testing.assert_close(weights[0], weights[1])


def test_minibatch_is_weighted_like_a_batch_and_keeps_groups_whole(
    tiny_model: Path, store: MediaStore
) -> None:
    learner = build(tiny_model, store, making.algorithm(minibatches=3))
    samples = making.samples(tiny_model, store, count=12, seed=2)
    ready = prepare(learner, store, samples)
    sizes: set[str] = set()
    for places in ready.minibatches:
        batches = [ready.micro_batches[at].batch for at in places]
        assert sum(float(b.loss_weight.numpy().sum()) for b in batches) == pytest.approx(1.0)
        groups = {origin.group_id for b in batches for origin in b.origins}
        assert groups and not groups & sizes
        sizes |= groups
    assert sizes == {sample.group_id for sample in samples}
    orders = [learner._order_minibatches(ready, epoch) for epoch in range(8)]
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [learner._order_minibatches(ready, epoch) for epoch in range(8)]


def test_values_are_aligned_with_tokens_and_the_head_trains(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    critic = Critic(AlgorithmConfig(minibatches=2))
    learner = build(tiny_model, store, critic)
    samples = without_advantages(making.samples(tiny_model, store, count=8, seed=3))
    lost = next(sample for sample in samples if sample.items)
    alone = {}
    for sample in samples:  # one sample at a time, by the weights before the step
        [micro_batch] = prepare(learner, store, [sample], 10**6).with_pixels().micro_batches
        values = learner.score_only(micro_batch).values
        assert values is not None
        alone[sample.trace_id] = values.numpy()
    store.path(lost.items[0].ref.digest).unlink()
    dropped = {s.trace_id for s in samples if lost.items[0] in s.items}
    head = learner.value_head
    assert head is not None
    before = [parameter.detach().clone() for parameter in head.parameters()]
    result = learner.step(prepare(learner, store, samples))
    [batch] = critic.batches
    assert batch.values is not None and 0 < len(dropped) < len(samples)
    for sample, values in zip(batch.samples, batch.values, strict=True):
        assert np.isnan(values).all() == (sample.trace_id in dropped)
        if sample.trace_id not in dropped:
            np.testing.assert_allclose(values, alone[sample.trace_id], atol=2e-5)
    rewards = {sample.trace_id: sample.reward for sample in samples}
    for tokens in critic.tokens:
        wanted = torch.tensor([rewards[o.trace_id] for o in tokens.origins])
        ids = tokens.sequence_ids
        assert tokens.old_values is not None
        torch.testing.assert_close(tokens.advantages, wanted[ids] - tokens.old_values)
    after = list(head.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert result.metrics["value_loss"] > 0
    check_head_in_checkpoints_only(learner, tiny_model, store, tmp_path)


def check_head_in_checkpoints_only(
    learner: Learner, model: Path, store: MediaStore, folder: Path
) -> None:
    assert "value_head" not in " ".join(plain_parameters(learner.forward.model))
    snapshot = take_snapshot(learner.forward.model, learner.optimizer, ParallelDims())
    files = snapshot.write(folder, "rank_000")
    shards = ShardReader([folder / file.name for file in files])
    again = build(model, store, Critic(AlgorithmConfig()))
    restore_model(shards, again.forward.model)
    check_parameters(
        dict(learner.forward.model.named_parameters()), dict(again.forward.model.named_parameters())
    )
    for a, b in zip(learner.value_head.parameters(), again.value_head.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(a, b)
    restore_model(shards, build(model, store, making.algorithm()).forward.model)  # to export


def test_a_teachers_logprobs_are_aligned_with_tokens(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    write_tiny("qwen_vl", tmp_path / "teacher", seed=7)
    student = Student(AlgorithmConfig(teacher=str(tmp_path / "teacher")))
    learner = build(tiny_model, store, student)
    samples = without_advantages(making.samples(tiny_model, store, count=4, seed=3))
    learner.step(prepare(learner, store, samples))
    [batch] = student.batches
    assert batch.teacher_logprobs is not None
    teacher = build(tmp_path / "teacher", store, making.algorithm())
    for sample, teacher_logprobs in zip(batch.samples, batch.teacher_logprobs, strict=True):
        [micro_batch] = prepare(teacher, store, [sample], 10**6).with_pixels().micro_batches
        np.testing.assert_allclose(teacher_logprobs, teacher.score(micro_batch), atol=2e-5)
    assert batch.policy_logprobs is not None
    unchanged = build(tiny_model, store, making.algorithm())
    for sample, policy_logprobs in zip(batch.samples, batch.policy_logprobs, strict=True):
        [micro_batch] = prepare(unchanged, store, [sample], 10**6).with_pixels().micro_batches
        np.testing.assert_allclose(policy_logprobs, unchanged.score(micro_batch), atol=2e-5)
    for tokens in student.tokens:
        torch.testing.assert_close(tokens.advantages, tokens.teacher_logprobs)


def test_a_teacher_of_another_family_is_refused(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    write_tiny("glm_v", tmp_path / "teacher", seed=7)
    student = Student(AlgorithmConfig(teacher=str(tmp_path / "teacher")))
    with pytest.raises(ConfigError, match=r"\[algorithm\] teacher"):
        build(tiny_model, store, student)


def test_a_teacher_with_another_tokenizer_of_the_same_size_is_refused(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer.json"
    description = json.loads(file.read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(description))
    student = Student(AlgorithmConfig(teacher=str(tmp_path / "teacher")))
    with pytest.raises(ConfigError, match=r"\[algorithm\] teacher .* for the policy and 'B' for"):
        build(tiny_model, store, student)


def test_a_teacher_takes_the_pixel_limits_of_the_policy(
    tiny_model: Path, store: MediaStore
) -> None:
    """DPO without a teacher compares with the starting checkpoint, whatever the limits are."""
    model = making.model_config(tiny_model, max_pixels=64 * 64)
    algorithm = load_algorithm(AlgorithmConfig(name="dpo"))
    learner = making.build_learner(
        model, making.trainer_config(), store, steps=1, algorithm=algorithm
    )
    assert learner.teacher is not None


def test_ppo_learns_the_values_of_a_batch(tiny_model: Path, store: MediaStore) -> None:
    algorithm = load_algorithm(AlgorithmConfig(name="ppo", args={"level": "turn"}))
    learner = build(tiny_model, store, algorithm, lr=1e-2)
    samples = without_advantages(making.samples(tiny_model, store, count=4, seed=3))
    errors = [
        learner.step(prepare(learner, store, samples)).metrics["value_loss"] for _ in range(6)
    ]
    assert errors[-1] < 0.5 * errors[0]


def test_dpo_measures_only_the_best_and_the_worst_rollout(
    tiny_model: Path, store: MediaStore
) -> None:
    learner = build(tiny_model, store, load_algorithm(AlgorithmConfig(name="dpo")))
    samples = without_advantages(making.group(tiny_model, store, 4))
    samples = [
        msgspec.structs.replace(sample, reward=reward)
        for sample, reward in zip(samples, (0.5, 1.0, 0.0, 0.5), strict=True)
    ]
    result = learner.step(prepare(learner, store, samples))
    # The policy is still the reference: every pair has a loss of log 2, and no order.
    assert result.metrics["dpo_loss"] == pytest.approx(np.log(2), rel=1e-4)
    assert result.metrics["preference_accuracy"] == 0.0
    equal = [msgspec.structs.replace(sample, reward=1.0) for sample in samples]
    assert learner.step(prepare(learner, store, equal)).metrics["dpo_loss"] is None


def test_distillation_moves_the_student_towards_its_teacher(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    write_tiny("qwen_vl", tmp_path / "teacher", seed=7)
    settings = AlgorithmConfig(
        name="distill", loss="tis", teacher=str(tmp_path / "teacher"), measure_entropy=False
    )
    learner = build(tiny_model, store, load_algorithm(settings), lr=1e-3)
    samples = without_advantages(making.samples(tiny_model, store, count=4, seed=3))
    ready = prepare(learner, store, samples)
    teacher = build(tmp_path / "teacher", store, making.algorithm())
    logprobs = [teacher.score(m).tolist() for m in ready.with_pixels().micro_batches]
    before = [learner.score(m).tolist() for m in ready.with_pixels().micro_batches]
    learner.step(ready)
    after = [learner.score(m).tolist() for m in ready.with_pixels().micro_batches]
    sampled = np.concatenate([m.batch.logprobs.numpy() for m in ready.micro_batches])
    ratios = np.minimum(np.exp(np.concatenate(before) - sampled), 2.0)
    moved = np.concatenate(after) - np.concatenate(before)
    advantages = np.concatenate(logprobs) - sampled
    assert (ratios * advantages * moved).sum() > 0.1 * np.linalg.norm(moved)


def test_self_distillation_reaches_a_checkpoint_of_the_same_model(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    """The checkpoint is exported after some training, and its own start learns from it."""
    samples = without_advantages(making.samples(tiny_model, store, count=4, seed=3))
    later = build(tiny_model, store, making.algorithm(advantage="no_std"), lr=3e-3)
    for _ in range(3):
        later.step(prepare(later, store, samples))
    export_checkpoint(tiny_model, tmp_path / "later", later.forward.model, torch.float32)
    settings = AlgorithmConfig(name="distill", teacher=str(tmp_path / "later"))
    learner = build(tiny_model, store, load_algorithm(settings), lr=1e-3)

    def score(scorer: Learner, sample: Sample) -> np.ndarray:
        [micro_batch] = prepare(scorer, store, [sample], 10**6).with_pixels().micro_batches
        return scorer.score(micro_batch)

    wanted, distances = [score(later, sample) for sample in samples], []
    for _ in range(8):
        logprobs = [score(learner, sample) for sample in samples]  # on-policy
        samples = [
            msgspec.structs.replace(sample, logprobs=Array.of(row, "float32"))
            for sample, row in zip(samples, logprobs, strict=True)
        ]
        gaps = np.concatenate(wanted) - np.concatenate(logprobs)
        distances.append(np.abs(gaps).mean())
        learner.step(prepare(learner, store, samples))
    assert distances[-1] < 0.2 * distances[0]


class Inspecting(Critic):
    """Plain policy gradient that records its inputs."""

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        return [np.ones(len(sample.trained)) for sample in batch.samples]

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        self.tokens.append(tokens)
        return AlgorithmLoss(-tokens.advantages * tokens.logprobs, {})


@pytest.mark.parametrize(
    ("needs", "given"),
    [
        (Needs(), set()),
        (Needs(reference_logprobs=True), {"reference_logprobs"}),
        (Needs(exact_kl=True), {"kl"}),
        (Needs(entropy=True), {"entropy"}),
        (Needs(values=True), {"values", "old_values"}),
    ],
)
def test_nothing_is_computed_unless_the_algorithm_needs_it(
    tiny_model: Path, store: MediaStore, needs: Needs, given: set[str]
) -> None:
    algorithm = Inspecting(AlgorithmConfig())
    algorithm.needs = needs
    learner = build(tiny_model, store, algorithm)
    learner.step(prepare(learner, store, without_advantages(making.samples(tiny_model, store, 2))))
    assert (learner.reference is not None) == needs.reference
    optional = (
        "reference_logprobs", "kl", "entropy", "values", "old_values", "teacher_logprobs",
    )  # fmt: skip
    for tokens in algorithm.tokens:
        assert {name for name in optional if getattr(tokens, name) is not None} == given
        if needs.reference_logprobs:  # the policy has not moved yet
            torch.testing.assert_close(tokens.reference_logprobs, tokens.logprobs)
