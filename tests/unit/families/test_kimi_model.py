"""A tiny Kimi K2.5 in transformers, in the embedded engine and in the trainer: one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import making
import pytest
import torch
from safetensors.torch import load_file
from serving import Client, Reference, live

from sightline import FamilyError, MediaStore
from sightline.compute.model import load_model
from sightline.families import load_family
from sightline.families.kimi_k25 import tiny
from sightline.inference.server_spec import ServerSpec
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.export import export_checkpoint
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.step_result import MetricSums, StepTimer
from sightline.wire.sample import Batch, Sample


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    tiny.write(path)
    return path


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def reference(kimi: Path, media: MediaStore) -> Reference:
    return Reference(kimi, media)


@pytest.fixture(scope="module")
def client(kimi: Path, media: MediaStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=kimi, media_roots=(media.root,), device="cpu", max_num_seqs=16, max_model_len=1024
    )
    with live(settings) as made:
        yield replace(made, modality=load_family(kimi).modality)


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for options in ({"experts": 1}, {"experts_per_token": 9}, {"type": "x"}, {"depth": 3}):
        with pytest.raises(FamilyError):
            tiny.write(tmp_path, **options)


def test_an_exported_checkpoint_has_all_that_the_source_has(kimi: Path, tmp_path: Path) -> None:
    model = load_model(kimi, load_family(kimi), "cpu", "float32").model
    # The bias that balances experts is no parameter; a checkpoint without it routes otherwise.
    name = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    export_checkpoint(kimi, tmp_path / "out", model)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(kimi / "model.safetensors")
    assert exported.keys() == source.keys()
    assert [n for n in source if not torch.equal(source[n], exported[n])] == [name]


# -- trainer


@pytest.fixture
def learner(kimi: Path, store: MediaStore) -> Learner:
    config = making.trainer_config()
    algorithm = making.algorithm(kl_coef=0.1)
    return making.build_learner(
        making.model_config(kimi), config, store, steps=10, algorithm=algorithm
    )


def ready(
    learner: Learner, store: MediaStore, samples: list[Sample], limit: PackSize
) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(learner.family, materializer, limit)
    return preparer.prepare(Batch(1, samples), digest="").with_pixels()


def gradients(learner: Learner, batch: ReadyBatch) -> tuple[float, dict[str, torch.Tensor]]:
    metric_sums = MetricSums(SUM_NAMES)
    learner.optimizer.zero_grad(set_to_none=True)
    for micro_batch in batch.micro_batches:
        learner.backward(micro_batch, metric_sums, StepTimer(learner.device))
    named = learner.forward.model.named_parameters()
    return metric_sums.read()["loss"], {
        name: p.grad.clone() for name, p in named if p.grad is not None
    }
