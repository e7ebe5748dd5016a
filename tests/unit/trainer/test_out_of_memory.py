"""A micro-batch that does not fit into memory is split once, and nothing else changes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest
import torch

from sightline.algo.algorithms import load_algorithm
from sightline.config import AlgorithmConfig
from sightline.errors import ProcessFailed
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.pack import PackSize, split_micro_batch
from sightline.pixels import Materializer
from sightline.trainer.alignment_checks import check_micro_batch
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.shard import full_tensor
from sightline.trainer.step_result import StepResult
from sightline.wire.sample import Batch, Sample


def build(
    model: Path,
    store: MediaStore,
    samples: list[Sample],
    max_tokens: int = 0,
    name: str = "grpo",
) -> tuple[Learner, ReadyBatch, MicroBatchPixels]:
    learner = making.build_learner(
        making.model_config(model),
        making.trainer_config(max_grad_norm=1e9, compile_backend=""),
        store,
        steps=4,
        algorithm=load_algorithm(AlgorithmConfig(name=name)),
    )
    for parameter in () if learner.value_head is None else learner.value_head.parameters():
        torch.nn.init.constant_(parameter, 0.1)  # a new head's values are all 0
    pixels = MicroBatchPixels(Materializer(learner.family, store, max_bytes=1 << 24))
    tokens = sum(len(sample.token_ids) for sample in samples)
    is_tree = len({sample.group_id for sample in samples}) < len(samples)
    max_tokens = max_tokens or max(tokens // 3 if is_tree else tokens * 2 // 3, 100)
    preparer = BatchPreparer(pixels, PackSize(max_tokens, 1 << 20), algorithm=learner.algorithm)
    return learner, preparer.prepare(Batch(1, samples), digest=""), pixels


class MemoryLimit:
    """Injects out-of-memory errors into passes over more tokens than fit.

    Torch's allocator on a CPU has no limit of its own. The error comes from a hook on the second
    block, or from the gradient of the first block's output, when later layers have gradients.
    """

    def __init__(self, learner: Learner, tokens: int, in_backward: bool) -> None:
        self.tokens, self.in_backward = tokens, in_backward
        self.failed = 0
        self.hidden: list[weakref.ref[Any]] = []
        learner.forward.blocks()[0 if in_backward else 1].register_forward_hook(self.check)

    def check(self, block: Any, given: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        self.hidden = [ref for ref in self.hidden if ref() is not None]
        self.hidden.append(weakref.ref(hidden))
        if hidden.shape[-2] <= self.tokens:
            return
        if self.in_backward and hidden.requires_grad:
            hidden.register_hook(self.refuse)
        else:
            self.refuse()

    def refuse(self, gradient: Any = None) -> None:
        self.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def gradients(learner: Learner) -> list[torch.Tensor]:
    groups = learner.optimizer.param_groups
    return [full_tensor(p.grad).clone() for g in groups for p in g["params"] if p.grad is not None]


def largest(ready: ReadyBatch) -> int:
    return max(len(micro_batch.batch.token_ids) for micro_batch in ready.micro_batches)


def assert_equal_steps(
    one: tuple[Learner, StepResult], other: tuple[Learner, StepResult], atol: float = 1e-6
) -> None:
    for a, b in zip(gradients(one[0]), gradients(other[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)
    for name in ("loss", "grad_norm", "trained_tokens", "mismatch_kl"):
        assert one[1].metrics[name] == pytest.approx(other[1].metrics[name], rel=1e-4), name
    by_node = [
        {(o.trace_id, o.node): s.logprobs.numpy()[o.start : o.stop] for o in s.origins}
        for s in (one[1].scores, other[1].scores)
    ]
    assert by_node[0].keys() == by_node[1].keys()
    for key, logprobs in by_node[0].items():
        assert np.allclose(logprobs, by_node[1][key], atol=1e-4)


def trees(model: Path, store: MediaStore, count: int) -> list[Sample]:
    groups = (making.group(model, store, count, seed, str(seed)) for seed in (0, 1))
    return [sample for group in groups for sample in group]


@pytest.mark.parametrize("draw", [making.samples, trees])
@pytest.mark.parametrize("in_backward", [False, True])
def test_split_micro_batch_has_the_gradients_of_the_whole(
    tiny_model: Path, store: MediaStore, draw: Any, in_backward: bool
) -> None:
    samples = draw(tiny_model, store, 6)
    plain, ready, _ = build(tiny_model, store, samples)
    assert len(ready.micro_batches) > 1
    wanted = plain.step(ready)
    learner, ready, pixels = build(tiny_model, store, samples)
    limit = MemoryLimit(learner, largest(ready) - 1, in_backward)
    result = learner.step(ready)
    assert result.metrics["oom_splits"] == limit.failed > 0
    assert wanted.metrics["oom_splits"] == 0
    assert_equal_steps((learner, result), (plain, wanted))
    assert pixels._held_bytes == 0, "the pixels of the failed pass are released"


@pytest.mark.parametrize("draw", [making.samples, trees])
def test_scores_of_a_split_micro_batch_are_those_of_the_whole(
    tiny_model: Path, store: MediaStore, draw: Any
) -> None:
    samples = [
        msgspec.structs.replace(
            sample,
            advantages=None,
            segments=[msgspec.structs.replace(s, turn=i) for i, s in enumerate(sample.segments)],
        )
        for sample in draw(tiny_model, store, 6)
    ]
    plain, ready, _ = build(tiny_model, store, samples, name="ppo")
    learner, _, _ = build(tiny_model, store, samples, name="ppo")
    limit = MemoryLimit(learner, largest(ready) - 1, in_backward=False)
    for micro_batch in ready.with_pixels().micro_batches:
        whole, parts = (one.score_only(micro_batch) for one in (plain, learner))
        torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts.values, whole.values, rtol=1e-4, atol=1e-5)
        assert parts.values is not None and parts.values.std() > 1e-3
    assert learner.num_splits == limit.failed > 0
    assert learner.evaluate(ready) == pytest.approx(plain.evaluate(ready), rel=1e-5)
    wanted, limit.failed = plain.step(ready), 0
    result = learner.step(ready)
    assert result.metrics["oom_splits"] == limit.failed > 0
    assert_equal_steps((learner, result), (plain, wanted))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3"])
def test_recurrent_states_and_texts_are_split(kind: str, tmp_path: Path, store: MediaStore) -> None:
    write_tiny("qwen_vl", tmp_path / "model", type=kind)
    samples = making.group(tmp_path / "model", store, 5)
    plain, ready, _ = build(tmp_path / "model", store, samples)
    wanted = plain.step(ready)
    learner, ready, _ = build(tmp_path / "model", store, samples)
    MemoryLimit(learner, largest(ready) - 1, in_backward=True)
    result = learner.step(ready)
    assert result.metrics["oom_splits"]
    assert_equal_steps((learner, result), (plain, wanted))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_activations_of_the_failed_pass_are_free_before_the_next(
    tiny_model: Path, store: MediaStore, name: str
) -> None:
    samples = making.samples(tiny_model, store, 6)
    learner, ready, _ = build(tiny_model, store, samples, name=name)
    limit = MemoryLimit(learner, largest(ready) - 1, in_backward=False)
    alive: list[int] = []
    block = list(learner.forward.blocks())[0]
    block.register_forward_pre_hook(
        lambda *_: alive.append(sum(ref() is not None for ref in limit.hidden))
    )
    learner.step(ready)
    assert limit.failed and max(alive) == 0


def test_single_rollout_and_a_part_that_does_not_fit_end_the_run(
    tiny_model: Path, store: MediaStore
) -> None:
    [sample] = making.samples(tiny_model, store, 1)
    learner, ready, _ = build(tiny_model, store, [sample])
    assert not split_micro_batch(ready.micro_batches[0].batch)
    MemoryLimit(learner, 1, in_backward=False)
    with pytest.raises(ProcessFailed, match="1 rollout .CUDA out of memory") as single:
        learner.step(ready)
    assert "max_sequence_tokens" in single.value.fix
    samples = making.samples(tiny_model, store, 6)
    learner, ready, _ = build(tiny_model, store, samples, max_tokens=1 << 20)
    limit = MemoryLimit(learner, 1, in_backward=False)
    with pytest.raises(ProcessFailed, match="rollouts") as many:
        learner.step(ready)
    assert limit.failed == 2, "once whole, and once as a part"
    assert "micro_batch_tokens" in many.value.fix
    with pytest.raises(ProcessFailed, match="step 1: no memory of cpu .* rollouts"):
        learner.evaluate(ready)
    assert limit.failed == 4


def test_parts_are_aligned_and_smaller(tiny_model: Path, store: MediaStore) -> None:
    samples = [
        *making.group(tiny_model, store, 4), *making.group(tiny_model, store, 3, 1, "other"),
    ]  # fmt: skip
    learner, ready, _ = build(tiny_model, store, samples)
    for micro_batch in ready.micro_batches:
        whole = micro_batch.batch
        parts = split_micro_batch(whole)
        assert len(parts) == 2
        for part in parts:
            check_micro_batch(part.batch, learner.family, learner.pad_ids, learner.vocab_size)
            assert len(part.batch.token_ids) < len(whole.token_ids)
            taken = np.flatnonzero(part.trains)
            ids = whole.token_ids.numpy()[whole.trained.numpy()[taken]]
            assert (part.batch.token_ids.numpy()[part.batch.trained.numpy()] == ids).all()
        assert (parts[0].trains ^ parts[1].trains).all()
