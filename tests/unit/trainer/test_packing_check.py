"""The side to suspect when sampler and trainer differ: one sequence, packed and alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest

from sightline.config import RunFile
from sightline.media import MediaStore
from sightline.pack import PackSize, pack, take_sequences
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch, ReadyMicroBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.packing_check import describe_suspect, measure_packing
from sightline.trainer.parallel_dims import ParallelDims
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample

WHOLE = PackSize(1 << 20, 1 << 20)


@pytest.fixture
def learner(tiny_model: Path, store: MediaStore) -> Learner:
    return making.build_learner(
        making.model_config(tiny_model), making.trainer_config(), store, steps=2
    )


def ready(learner: Learner, store: MediaStore, samples: list[Sample]) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    return BatchPreparer(MicroBatchPixels(materializer), WHOLE).prepare(
        Batch(1, samples), digest=""
    )


@pytest.mark.parametrize("kind", ["flat", "tree"])
def test_a_sequence_taken_from_a_pack_equals_its_sample(
    tiny_model: Path, store: MediaStore, kind: str
) -> None:
    family = making.family(tiny_model)
    make = making.samples if kind == "flat" else making.group
    samples = make(tiny_model, store, 4)
    [packed] = pack(samples, 1, family, WHOLE)
    sequences = list(take_sequences(packed))
    assert len(sequences) == len(samples)
    for part in sequences:
        single = part.batch
        ids = single.token_ids.numpy().tolist()
        [sample] = [s for s in samples if s.token_ids.numpy()[: len(ids)].tolist() == ids]
        assert int(sample.trained.numpy()[-1]) == len(ids) - 1
        [alone] = pack([sample], 1, family, WHOLE)
        for name in ("positions", "parent"):
            whole = getattr(alone, name).numpy()[..., : len(ids)]
            np.testing.assert_array_equal(getattr(single, name).numpy(), whole)
        assert set(sample.trained.numpy().tolist()) <= set(single.trained.numpy().tolist())
        assert len(single.trained) == part.trains.sum()
        slots = {(slot.offset, slot.length, single.items[slot.item].item) for slot in single.slots}
        assert [packed.items[at] for at in part.items] == single.items
        own_slots = [slot for slot in alone.slots if slot.end <= len(ids)]
        assert slots == {(s.offset, s.length, alone.items[s.item].item) for s in own_slots}


def test_the_trainer_is_suspected_if_its_pack_changes_a_sequence(
    learner: Learner, tiny_model: Path, store: MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ready(learner, store, making.samples(tiny_model, store, 4))
    assert measure_packing(batch, learner.score) < 1e-10
    assert "suspect the server" in describe_suspect(batch, learner, 1e-6)
    score = learner.score

    def leak(micro_batch: ReadyMicroBatch) -> np.ndarray:
        """Score with each token attending to all tokens before it, across sequences."""
        ends = np.full_like(micro_batch.batch.subtree_end.numpy(), len(micro_batch.batch.token_ids))
        leaky = msgspec.structs.replace(micro_batch.batch, subtree_end=Array.of(ends, "int32"))
        return score(replace(micro_batch, batch=leaky))

    monkeypatch.setattr(learner, "score", leak)
    assert "Suspect the trainer" in describe_suspect(batch, learner, 1e-6)
    monkeypatch.setattr(ParallelDims, "is_distributed", True)
    assert "trace replay" in describe_suspect(batch, learner, 1e-6)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"model": {"dtype": "float32"}}, 1e-6),
        ({"model": {"dtype": "bfloat16"}}, 0.015),
        ({"inference": {"keep_kv_over_updates": True}}, 0.1),
        ({"orchestrator": {"max_mismatch": 0.5}}, 0.5),
        ({"orchestrator": {"max_mismatch": 0}}, 0.0),
    ],
)
def test_the_limit_follows_from_the_dtype(settings: dict[str, Any], limit: float) -> None:
    base: dict[str, dict[str, object]] = {"model": {"path": "m"}, "env": {"name": "e"}}
    for section, values in settings.items():
        base[section] = {**base.get(section, {}), **values}
    assert RunFile.model_validate(base).mismatch_limit == limit
