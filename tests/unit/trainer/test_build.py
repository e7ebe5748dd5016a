"""The trainer that `build` makes of a run file has its settings: each is seen by what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import making
import msgspec
import numpy as np
import pytest
import torch

from sightline.config import RunFile
from sightline.errors import MediaError
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trainer.build import Orchestrator, build, find_replayed_steps
from sightline.trainer.loop import TrainerComponents
from sightline.wire.control import BatchReady
from sightline.wire.sample import Batch, digest_batch

from .test_resume import run_dir

__all__ = ["run_dir"]

LR, WARMUP, DIVISOR = 1e-2, 10, 7.0


def open_trainer(model: Path, run_dir: RunDir, max_bad_fraction: float) -> TrainerComponents:
    """Build the trainer of a run whose first batch has a sample without pixel digests."""
    config = RunFile.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"name": "color_codeword"},
            "run": {"steps": 9, "seed": 5},
            "algorithm": {
                "minibatches": 2, "aggregation": "constant",
                "aggregation_args": {"divisor": DIVISOR},
            },
            "media": {"max_bad_fraction": max_bad_fraction},
            "orchestrator": {"max_mismatch": 0},
            "trainer": {
                "device": "cpu", "lr": LR, "warmup_steps": WARMUP, "weight_decay": 0.0,
                "max_sequence_tokens": 40, "stall_timeout_s": 0,
            },
        }
    )  # fmt: skip
    samples = making.samples(model, MediaStore(run_dir.media), count=12)
    place = next(i for i, sample in enumerate(samples) if sample.slots)
    bare = [msgspec.structs.replace(slot, pixel_digest=None) for slot in samples[place].slots]
    samples[place] = msgspec.structs.replace(samples[place], slots=bare)
    data = Batch(1, samples).to_bytes()
    announcements = iter([BatchReady(1, digest_batch(data), data), None])
    return build(config, run_dir, Orchestrator(lambda: next(announcements), lambda message: None))


def test_batches_and_steps_follow_the_run_file(tiny_model: Path, run_dir: RunDir) -> None:
    parts = open_trainer(tiny_model, run_dir, max_bad_fraction=0.5)
    feed = iter(parts.feed)
    ready = next(feed)
    assert len(ready.minibatches) == 2 and all(ready.minibatches)
    assert ready.bad == {"PixelsUnproven": 1}, "nothing shows what the sampler saw"
    packs = [micro_batch.batch for micro_batch in ready.micro_batches]
    assert ready.truncated and max(int(p.positions.numpy().max()) for p in packs) < 40
    for places in ready.minibatches:
        parts_of_update = [packs[at] for at in places]
        num_samples = len({o.trace_id for pack in parts_of_update for o in pack.origins})
        for pack in parts_of_update:
            weights = pack.loss_weight.numpy()
            np.testing.assert_allclose(weights, 1 / (num_samples * DIVISOR), rtol=1e-6)
    # The first update of Adam moves every weight with a gradient by the learning rate.
    learner = parts.learner
    before = {name: p.detach().clone() for name, p in learner.forward.model.named_parameters()}
    for group in learner.optimizer.param_groups:
        group["lr"] = LR
    result = learner.step(replace(ready, minibatch_sizes=None))
    moved = max(
        float((p.detach() - before[name]).abs().max())
        for name, p in learner.forward.model.named_parameters()
    )
    assert moved == pytest.approx(LR / WARMUP, rel=0.01)
    assert result.metrics["lr"] == pytest.approx(LR / WARMUP)
    assert list(feed) == []


def test_bad_samples_above_the_fraction_end_the_run(tiny_model: Path, run_dir: RunDir) -> None:
    parts = open_trainer(tiny_model, run_dir, max_bad_fraction=0.0)
    with pytest.raises(MediaError, match="max_bad_fraction = 0.0"):
        next(iter(parts.feed))


def test_only_replayed_steps_of_a_gpu_skip_the_exact_check(run_dir: RunDir) -> None:
    """A replay on a GPU may compute other bits. Batches after the next were sampled by them."""
    for step in (3, 4, 5, 6):
        run_dir.batch(step).write_bytes(b"")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert find_replayed_steps(gpu, run_dir, 2) == range(4, 7)
    assert not find_replayed_steps(gpu, run_dir, 6) and not find_replayed_steps(cpu, run_dir, 2)
