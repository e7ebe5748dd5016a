"""Compiled blocks: as many graphs as their classes need, for any number of blocks and shapes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.compute import attention_cuda, attention_dense
from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import Cost
from sightline.pixels import Materializer
from sightline.trainer import learner as learner_module
from sightline.trainer.blocks import num_compiled
from sightline.trainer.build import build_learner
from sightline.trainer.feed import Preparer
from sightline.wire.sample import Batch

STEPS = 4
TREES = 7


def deepened(model: Path, target: Path, layers: int) -> Path:
    """The same checkpoint with more blocks of each kind."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.copytree(model, target)
    config = AutoConfig.from_pretrained(model)
    config.text_config.num_hidden_layers = config.vision_config.depth = layers
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(target)
    return target


def compilations(model: Path, store: MediaStore) -> tuple[int, list[int], int]:
    """How many blocks there are, the graphs of each step, and how many shapes there were."""
    import torch._dynamo

    torch._dynamo.reset()
    config = making.trainer_config(compile="eager")  # dynamo alone: graphs are what is counted
    learner = build_learner(making.model_config(model), config, store, STEPS)
    found, shapes = [], set()
    for step in range(1, STEPS + 1):
        samples = making.samples(model, store, 6, seed=step)
        materializer = Materializer(learner.family, store, 1 << 24)
        preparer = Preparer(learner.family, materializer, Cost(160, 4096), 0.0)
        ready = preparer.prepare(Batch(step, samples), "")
        shapes |= {len(m.batch.token_ids) for m in ready.micro_batches}
        found.append(int(learner.step(ready).metrics["compilations"] or 0))
    return len(learner.forward.blocks()), found, len(shapes)


@pytest.mark.filterwarnings("ignore")
def test_graphs_are_shared_by_blocks_of_a_class_and_serve_every_shape(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    few, first, shapes = compilations(tiny_model, store)
    many, deep, _ = compilations(deepened(tiny_model, tmp_path / "deep", layers=6), store)
    assert many == 3 * few
    assert sum(deep) == sum(first) > 0, "as many for 12 blocks as for 4"
    # Attention is called between graphs, so that a block is several; each is compiled for its
    # first shape and once more for any other.
    assert shapes > 6 and sum(first) < 2 * shapes * few
    assert sum(first[2:]) <= 2, "shapes that come later find what they need"


def test_nothing_is_counted_where_nothing_is_compiled(tiny_model: Path, store: MediaStore) -> None:
    learner = build_learner(making.model_config(tiny_model), making.trainer_config(), store, 1)
    materializer = Materializer(learner.family, store, 1 << 24)
    preparer = Preparer(learner.family, materializer, Cost(1 << 20, 1 << 20), 0.0)
    samples = making.samples(tiny_model, store, 2)
    ready = preparer.prepare(Batch(1, samples), "")
    assert learner.step(ready).metrics["compilations"] is None


def steps_on_trees(model: Path, store: MediaStore, **changes: object) -> list[tuple[float, int]]:
    """The norm of each step's gradient, and the graphs that it took."""
    import torch._dynamo

    torch._dynamo.reset()
    learner = build_learner(
        making.model_config(model), making.trainer_config(**changes), store, TREES
    )
    found = []
    for step in range(1, TREES + 1):
        samples = making.group(model, store, 3 + step, seed=step)
        materializer = Materializer(learner.family, store, 1 << 24)
        preparer = Preparer(learner.family, materializer, Cost(1 << 20, 1 << 20), 0.0)
        metrics = learner.step(preparer.prepare(Batch(step, samples), "")).metrics
        materializer.close()
        found.append((float(metrics["grad_norm"] or 0), int(metrics["compilations"] or 0)))
    return found


def by_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    """Rows of any lengths, by a plain mask."""
    row = torch.bucketize(torch.arange(q.shape[0]), ends[1:], right=True)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = row[:, None] == row[None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options["scale"])
    return out.transpose(0, 1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patterns of a GPU; plain arithmetic for its kernels, which has gradients anywhere."""
    from torch.nn.attention import flex_attention as flex

    def plain(q: Any, k: Any, v: Any, scaling: float, causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling)

    def images_of(hidden: Any, ends: Any, longest: int, *heads: int) -> attention_cuda.Images:
        assert heads == (2, 32)
        is_even = attention_dense.takes_images(ends, longest, len(hidden))
        return attention_cuda.Images(is_even)

    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)
    monkeypatch.setattr(attention_cuda, "_compiled_flex", lambda: flex.flex_attention)
    monkeypatch.setattr(attention_cuda, "_varlen", lambda: (by_documents, {}))
    monkeypatch.setattr(attention_cuda, "images_of", images_of)
    monkeypatch.setattr(attention_dense, "_cudnn", plain)
    monkeypatch.setattr(attention_dense, "MIN_TOKENS", 1)
    monkeypatch.setattr(attention_dense, "PLANS", attention_dense.Plans())
    monkeypatch.setattr(
        learner_module,
        "pattern_of",
        lambda ends, device, dtype: attention_cuda.FlexTree(ends, device),
    )


@pytest.mark.filterwarnings("ignore")
def test_a_block_with_a_tree_or_with_images_is_one_graph(
    tiny_model: Path, store: MediaStore, request: pytest.FixtureRequest
) -> None:
    plain = steps_on_trees(tiny_model, store)
    broken = steps_on_trees(tiny_model, store, compile="aot_eager")
    request.getfixturevalue("as_on_a_gpu")
    whole = steps_on_trees(tiny_model, store, compile="aot_eager", activation_checkpointing=True)
    assert [norm for norm, _ in whole] == pytest.approx([norm for norm, _ in plain], rel=1e-5)
    assert whole[0][1] == 3, "blocks of text, blocks of the tower, and the loss"
    assert 0 < sum(num for _, num in whole) < sum(num for _, num in broken)
    assert sum(num for _, num in whole[5:]) <= 2, "shapes that come later find what they need"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_images_of_one_size_are_in_the_graph_too(tiny_model: Path, store: MediaStore) -> None:
    import torch._dynamo

    family = load_family(tiny_model)
    grids = [(1, 4, 6)] * 3
    size = (sum(24 for _ in grids), 3 * family.patch**2)
    patches = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    found = []
    for changes in ({}, {"compile": "aot_eager"}):
        torch._dynamo.reset()
        learner = build_learner(
            making.model_config(tiny_model), making.trainer_config(**changes), store, 1
        )
        for _ in range(attention_dense.RETURNS):
            before = num_compiled()
            features = learner.forward.encode(patches, grids)
        learner.forward.model.zero_grad()
        features.square().sum().backward()
        found.append([p.grad for _, p in learner.forward.vision_parameters()])
    assert num_compiled() == before + 1, "the third micro-batch has another graph: cuDNN's"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
