"""Compiled blocks: as many graphs as their classes need, for any number of blocks and shapes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import making
import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.compute import attention, attention_cuda, plain_gradient
from sightline.compute import attention_cudnn as attention_dense
from sightline.compute.fused_layers import (
    plain_layer_norm,
    plain_norm,
    plain_rotate,
    plain_silu_mul,
)
from sightline.compute.plain_gradient import call_exact
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer import forward_pass
from sightline.trainer.blocks import count_compiled_graphs
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire.sample import Batch, Sample

pytestmark = pytest.mark.ranks

STEPS = 4


@pytest.fixture(autouse=True)
def without_shape_checks() -> Iterator[None]:
    """Disable the shape checks, because the compiler would trace them and break its graphs."""
    was = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was)


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
    """Return the number of blocks, the graphs of each step, and the number of shapes."""
    import torch._dynamo

    torch._dynamo.reset()
    config = making.trainer_config(
        compile_backend="eager"
    )  # dynamo alone: graphs are what is counted
    learner = making.build_learner(making.model_config(model), config, store, STEPS)
    counts, shapes = [], set()
    for step in range(1, STEPS + 1):
        samples = making.samples(model, store, 6, seed=step)
        materializer = Materializer(learner.family, store, 1 << 24)
        preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(160, 4096))
        ready = preparer.prepare(Batch(step, samples), "")
        shapes |= {len(m.batch.token_ids) for m in ready.micro_batches}
        counts.append(int(learner.step(ready).metrics["compilations"] or 0))
    return len(learner.forward.blocks()), counts, len(shapes)


@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs_are_shared_by_blocks_and_shapes(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    few, first, shapes = compilations(tiny_model, store)
    many, deep, _ = compilations(deepened(tiny_model, tmp_path / "deep", layers=6), store)
    assert many == 3 * few
    assert sum(deep) == sum(first) > 0, "as many for 12 blocks as for 4"
    # Attention is called between graphs, so that a block is several. Each is compiled for its
    # first shape and once more for any other.
    assert shapes > 6 and sum(first) < 2 * shapes * few
    assert sum(first[2:]) <= 2, "shapes that come later find what they need"


def steps_of(
    draw: Any, model: Path, store: MediaStore, num: int, **changes: object
) -> list[tuple[float, int]]:
    """Return each step's gradient norm, and the number of graphs that it compiled."""
    import torch._dynamo

    torch._dynamo.reset()
    learner = making.build_learner(
        making.model_config(model), making.trainer_config(**changes), store, num
    )
    losses = []
    for step in range(1, num + 1):
        materializer = Materializer(learner.family, store, 1 << 24)
        preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
        ready = preparer.prepare(Batch(step, draw(model, store, step)), "")
        metrics = learner.step(ready).metrics
        materializer.close()
        losses.append((float(metrics["grad_norm"] or 0), int(metrics["compilations"] or 0)))
    return losses


def trees(model: Path, store: MediaStore, step: int) -> list[Sample]:
    return making.group(model, store, 3 + step, seed=step)


def rows(model: Path, store: MediaStore, step: int) -> list[Sample]:
    """From the third step on of one shape, once they are padded."""
    samples = making.samples(model, store, 3 + min(step, 3), seed=min(step, 3))
    return [msgspec.structs.replace(sample, group_id=str(i)) for i, sample in enumerate(samples)]


def by_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    """Rows of any lengths, as torch's kernel on a GPU takes them."""
    place = torch.arange(q.shape[0])
    row = torch.bucketize(place, ends[1:], right=True)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = row[:, None] == row[None, :]
    if options["window_size"] == (-1, 0):
        mask = mask & (place[:, None] >= place[None, :])
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=options["scale"], enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention patterns of a GPU, with plain arithmetic in place of its kernels."""
    from torch.nn.attention import flex_attention as flex

    def plain(q: Any, k: Any, v: Any, scaling: float, causal: bool) -> torch.Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=gqa
        )

    def pattern_of(ends: np.ndarray, device: torch.device, dtype: torch.dtype) -> Any:
        pattern: Any = attention.build_attention_pattern(ends, device, dtype)
        if isinstance(pattern, attention.TreePattern):
            return attention_cuda.FlexTreePattern(ends, device)
        return attention_cuda.VarlenPattern(np.diff([0, *np.unique(ends)]).tolist(), device)

    in_graph = attention.find_graph_options

    def takes_all(hidden: torch.Tensor, options: dict[str, Any]) -> dict[str, Any] | None:
        with monkeypatch.context() as patched:
            patched.setattr(attention_cuda, "is_supported", lambda x: True)
            return in_graph(hidden, options)

    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)
    monkeypatch.setattr(attention_cuda, "_compiled_flex", lambda: flex.flex_attention)
    monkeypatch.setattr(attention_cuda, "_varlen", lambda: (by_mask, {}))
    monkeypatch.setattr(attention, "find_graph_options", takes_all)
    monkeypatch.setattr(attention_dense, "_cudnn", plain)
    monkeypatch.setattr(attention_dense, "MIN_TOKENS", 1)
    monkeypatch.setattr(attention_dense, "MAX_PADDING_RATIO", 1e9)
    monkeypatch.setattr(attention_dense, "SHAPES", attention_dense.ShapeCounter())
    monkeypatch.setattr(forward_pass, "build_attention_pattern", pattern_of)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draw", [pytest.param(trees, marks=pytest.mark.thorough), rows])
def test_block_is_one_graph_on_a_gpu(
    tiny_model: Path, store: MediaStore, draw: Any, request: pytest.FixtureRequest
) -> None:
    plain = steps_of(draw, tiny_model, store, 6)
    broken = steps_of(draw, tiny_model, store, 1, compile_backend="eager")
    request.getfixturevalue("as_on_a_gpu")
    compiled = {"compile_backend": "aot_eager", "activation_checkpointing": True}
    whole = steps_of(draw, tiny_model, store, 6, **compiled)
    assert [norm for norm, _ in whole] == pytest.approx([norm for norm, _ in plain], rel=1e-5)
    graphs = [num for _, num in whole]
    assert graphs[0] == 3 < broken[0][1], "blocks of text, blocks of the tower, and the loss"
    assert sum(graphs) < 24, graphs
    assert graphs[-1] == 0, "shapes that come later find what they need"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_recurrent_layers_are_excluded_from_graphs(tmp_path: Path, store: MediaStore) -> None:
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type="qwen3_5")
    plain = steps_of(trees, tmp_path / "model", store, 2)
    changes = {"compile_backend": "eager", "activation_checkpointing": True}
    compiled = steps_of(trees, tmp_path / "model", store, 2, **changes)
    assert [norm for norm, _ in compiled] == pytest.approx([norm for norm, _ in plain], rel=1e-5)
    assert compiled[0][1] > 0


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_routes_are_replayed_in_the_graph_of_a_block(tmp_path: Path, store: MediaStore) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type="qwen3_vl_moe", layers=3)
    # In float32, transformers multiplies outside the graph.
    config = making.model_config(tmp_path / "model", dtype="bfloat16")
    learners = [
        making.build_learner(config, making.trainer_config(**changes), store, 3)
        for changes in ({}, {"compile_backend": "aot_eager", "activation_checkpointing": True})
    ]
    graphs = []
    for step in range(1, 3):
        batch = Batch(
            step, [making.with_routes(s, 3) for s in trees(tmp_path / "model", store, step)]
        )
        fractions = []
        for learner in learners:
            materializer = Materializer(learner.family, store, 1 << 24)
            preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
            metrics = learner.step(preparer.prepare(batch, "")).metrics
            fractions.append((metrics["differing_routes_fraction"], metrics["grad_norm"]))
        assert fractions[0] == pytest.approx(fractions[1], rel=0.05)
        graphs.append(int(metrics["compilations"] or 0))
    assert graphs[0] == 3, "blocks of text, blocks of the tower, and the loss"
    assert graphs[1] <= 4, graphs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_equal_sized_images_are_also_in_the_graph(tiny_model: Path, store: MediaStore) -> None:
    import torch._dynamo

    family = load_family(tiny_model)
    grids = [(1, 4, 6)] * 3
    size = (sum(24 for _ in grids), 3 * family.patch**2)
    patches = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    grads = []
    for changes in ({}, {"compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        learner = making.build_learner(
            making.model_config(tiny_model), making.trainer_config(**changes), store, 1
        )
        for _ in range(attention_dense.MIN_SHAPE_REPEATS):
            before = count_compiled_graphs()
            features = learner.forward.encode(patches, grids)
        learner.forward.model.zero_grad()
        features.square().sum().backward()
        grads.append([p.grad for _, p in learner.forward.vision_parameters()])
    assert count_compiled_graphs() == before + 1, "the third micro-batch has another graph: cuDNN's"
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_formula_gradients_are_compiled_without_their_results(backend: str) -> None:
    import torch._dynamo

    draw = partial(torch.randn, dtype=torch.float64)
    shapes = {
        partial(plain_norm, eps=1e-6): [(5, 16), (16,)],
        partial(plain_layer_norm, eps=1e-6): [(5, 16), (16,), (16,)],
        partial(plain_silu_mul): [(5, 16), (5, 16)],
        partial(plain_rotate, eps=1e-6): [(5, 16), (5, 8), (5, 4), (5, 4), (4,), (4,)],
        partial(plain_rotate, rounds=False): [(5, 16), (5, 16), (5, 4), (5, 4)],
    }

    def total(found: Any) -> torch.Tensor:
        parts = found if isinstance(found, tuple) else (found,)
        return torch.stack([(1 + i) * x.square().sum() for i, x in enumerate(parts)]).sum()

    for plain, given in shapes.items():
        torch._dynamo.reset()
        inputs = [draw(shape) for shape in given]
        for frozen in range(len(inputs)):
            needed = [x.requires_grad_(i != frozen) for i, x in enumerate(inputs)]
            needed = [x for x in needed if x.requires_grad]
            wanted = torch.autograd.grad(total(plain(*inputs)), needed)
            before = count_compiled_graphs()
            plain_gradient.compile_gradients(backend)
            try:
                out = call_exact(plain, plain, *inputs)
                found = torch.autograd.grad(total(out), needed)
            finally:
                plain_gradient.compile_gradients("")
            assert (count_compiled_graphs() > before) == bool(backend)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
