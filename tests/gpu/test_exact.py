"""`[model] exact = true` on a GPU, in bfloat16: each cause of difference alone, then all of it.

    EXACT_MODEL=DIR pytest tests/gpu/test_exact.py -s -k "samplers or masters"

takes the checkpoint in DIR for the last two tests (`sightline model random DIR --like 2b`). They
print the largest difference over EXACT_TOKENS sampled tokens (100,000), and the share of weights
that changed after 20 steps. The default is a tiny model.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path

import exactness
import making
import numpy as np
import pytest
import torch
from exactness import Passes
from serving import embedded
from torch import nn

from sightline.compute import exact
from sightline.compute.attention_exact import attend_run, build_tiles, count_queries
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.trainer.learner import SUM_NAMES
from sightline.trainer.step_result import MetricSums

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
LENGTH = 1200
"""Tokens: more than two parts of keys of the decoding kernel."""
SHAPES = [(2048, 6144), (4096, 2048), (2048, 2048), (6144, 2048), (1024, 2048), (4096, 12288)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "model"
    # Wide enough for the kernels of a real model: products are split, heads share their keys.
    write_tiny(
        "qwen_vl", path, seed=0, dtype="bfloat16", hidden=512, heads=8, kv_heads=4, head_dim=64,
        intermediate=3072, layers=3,
    )  # fmt: skip
    return path


@cache
def passes(model: Path, is_exact: bool, length: int = LENGTH) -> Passes:
    return Passes(model, is_exact, "cuda", "bfloat16", length)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 128), (8, 8, 64), (6, 2, 128)])
def test_query_is_bit_identical_alone_and_in_a_tile(heads: int, kv_heads: int, width: int) -> None:
    from sightline.compute.triton_kernels import attend_paged

    device, length = torch.device("cuda"), 1100
    torch.manual_seed(0)
    num_pages = -(-length // 64)
    keys, values = (
        torch.randn(num_pages, 64, kv_heads, width, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    q = torch.randn(length, heads, width, device=device, dtype=torch.bfloat16)
    tables = np.arange(num_pages)[None]
    queries = count_queries(heads, kv_heads, device)
    tiles = build_tiles(tables, np.array([0]), np.array([length]), queries, device)
    whole = attend_run(q, keys, values, tiles, width**-0.5)
    start = 517
    part = build_tiles(tables, np.array([start]), np.array([length - start]), queries, device)
    assert torch.equal(whole[start:], attend_run(q[start:], keys, values, part, width**-0.5))
    each = torch.from_numpy(np.repeat(tables, length, axis=0).astype(np.int32)).to(device)
    lengths = torch.arange(1, length + 1, dtype=torch.int32, device=device)
    assert torch.equal(whole, attend_paged(q, keys, values, each, lengths, width**-0.5))
    plain = nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None].float() for x in (q, keys.flatten(0, 1)[:length],
                                                    values.flatten(0, 1)[:length])),
        is_causal=True, enable_gqa=heads != kv_heads,
    )[0].transpose(0, 1)  # fmt: skip
    assert (whole.float() - plain).abs().max() < 3e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_find_rows_gives_batch_invariant_matmuls(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
    rows = exact.find_rows("layer", layer, torch.device("cuda"), torch.bfloat16)
    print(f"{shape}: {rows[0]} rows or more")
    x = torch.randn(2 * exact.MAX_ROWS + 100, shape[1], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = exact.multiply(x, layer.weight, None, *rows)  # in three parts
        for part in (slice(0, 50), slice(exact.MAX_ROWS - 3, exact.MAX_ROWS + 40), slice(-7, None)):
            assert torch.equal(whole[part], exact.multiply(x[part], layer.weight, None, *rows))


def test_packing_is_exact(model: Path) -> None:
    for length in (1, 5, 700, LENGTH):
        outputs = passes(model, True, length)
        alone = outputs.train()
        for before, after in ((3, 0), (64, 77), (1, 3000)):
            assert torch.equal(alone, outputs.train(before, after)), (length, before, after)


@pytest.mark.parametrize("chunks", [[1] * 9 + [1191], [7, 64, 513, 616], [512, 512, 176]])
def test_chunked_prefill_is_exact(model: Path, chunks: list[int]) -> None:
    outputs = passes(model, True)
    assert torch.equal(outputs.train(), outputs.prefill(outputs.open(), chunks))


def test_batch_size_does_not_change_logprobs(model: Path) -> None:
    outputs = passes(model, True)
    wanted = outputs.train()[-40:]
    assert torch.equal(wanted, outputs.prefill(outputs.open(), [1160, 40], beside=6)[-40:])
    kv = outputs.open()
    outputs.prefill(kv, [1160])
    for idle in (0, 15, 255):
        assert torch.equal(wanted, outputs.decode(kv, 1160, idle)), idle


def test_reused_keys_and_values_are_exact(model: Path) -> None:
    outputs = passes(model, True)
    kv = outputs.open()
    outputs.prefill(kv, [1000, 200])
    kv.share_prefix(0, 1, 777)
    rest = outputs.prefill(kv, [20, LENGTH - 797], row=1, start=777)
    assert torch.equal(outputs.train()[777:], rest)


def test_results_differ_without_exact_mode(model: Path) -> None:
    """Check that the test can fail: without exact mode, results differ."""
    outputs = passes(model, False)
    alone = outputs.train()
    differs = {
        "tree": not torch.equal(alone, outputs.train_in_tree(600)),
        "chunking": not torch.equal(alone, outputs.prefill(outputs.open(), [7, 64, 513, 616])),
        "packing": not torch.equal(alone, outputs.train(64, 3000)),
    }
    print(differs)
    assert differs["tree"] or differs["chunking"] or differs["packing"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["", "inductor"])
def test_exact_gradients_match_the_default_mode(
    model: Path, store: MediaStore, backend: str
) -> None:
    samples, gradients = making.samples(model, store, count=4), []
    for is_exact in (False, True):
        config = making.model_config(model, dtype="bfloat16", exact=is_exact)
        trainer = making.trainer_config(
            device="cuda", master_dtype="model", compile_backend=backend if is_exact else ""
        )
        learner = making.build_learner(config, trainer, store, steps=1)
        ready = exactness.prepare(learner, model, store, samples, 1 << 20, step=1)
        for micro_batch in ready.micro_batches:
            learner.backward(micro_batch, MetricSums(SUM_NAMES))
        grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                 for p in learner.forward.model.parameters()]  # fmt: skip
        gradients.append(torch.cat([grad.float().flatten() for grad in grads]))
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    print(f"gradients of exact and other mode differ by {difference:.2g} of their norm")
    assert difference < 5e-2


@pytest.mark.parametrize("master", ["float32", "model"])
def test_logprobs_equal_the_samplers(
    model: Path, store: MediaStore, tmp_path: Path, master: str
) -> None:
    """Turns with images, groups with one prompt, graphs, chunks, windows of keys, an update."""
    python_path = os.environ.get("EXACT_MODEL")
    wanted = int(os.environ.get("EXACT_TOKENS", 100_000 if python_path else 6_000))
    path = Path(python_path) if python_path else model
    turns, group_size = 4, 8
    max_tokens = 256 if python_path else 48
    groups = max(2, -(-wanted // (turns * group_size * max_tokens)))
    settings = ServerSpec.of(
        path=path, media_roots=(store.root,), device="cuda", dtype="bfloat16", exact=True,
        max_num_seqs=64, max_model_len=4096, prefill_chunk_tokens=300, weights_root="/",
    )  # fmt: skip
    trainer = making.trainer_config(device="cuda", master_dtype=master)
    config = making.model_config(path, dtype="bfloat16", exact=True)
    with embedded(settings) as client:
        learner = making.build_learner(config, trainer, store, steps=10)
        manifest, _ = making.publish(learner.forward.model, tmp_path / "w", 1, torch.bfloat16)
        samples = exactness.play(
            client, path, store, groups=groups, group_size=group_size, turns=turns,
            max_tokens=max_tokens, image_side=480,
            # Publish the same weights as another version, so that everything is computed again.
            between_turns=lambda turn: turn == 1 and client.adopt(manifest),
        )  # fmt: skip
        replayed = client.totals()["steps_replayed"]
        total, differing, largest = 0, 0, 0.0
        for step in (1, 2, 3):
            ready = exactness.prepare(learner, path, store, samples, 16384, step)
            sampler, scored = exactness.compare(learner, ready)
            total, differing = total + len(sampler), differing + int((sampler != scored).sum())
            largest = max(largest, float(np.abs(sampler - scored).max()))
            if step == 2:  # an update, which the server adopts
                assert learner.step(ready).metrics["mismatch_kl"] == 0
                trained = learner.forward.model
                client.adopt(making.publish(trained, tmp_path / "w", 2, torch.bfloat16)[0])
                samples = exactness.play(
                    client, path, store, groups=2, group_size=group_size, turns=turns,
                    max_tokens=max_tokens, image_side=480,
                )  # fmt: skip
    print(
        f"{total} tokens, {replayed:.0f} steps replayed as graphs: {differing} logprobs differ, "
        f"the largest difference is {largest}"
    )
    assert replayed and total > wanted // 3
    assert differing == 0 and largest == 0.0


@pytest.mark.filterwarnings("ignore")
def test_float32_masters_move_weights(model: Path, store: MediaStore) -> None:
    path = Path(os.environ.get("EXACT_MODEL", model))
    samples, changed = making.samples(path, store, count=8), {}
    for is_exact, master in ((True, "float32"), (False, "float32"), (True, "model")):
        config = making.model_config(path, dtype="bfloat16", exact=is_exact)
        trainer = making.trainer_config(device="cuda", lr=1e-6, master_dtype=master)
        learner = making.build_learner(config, trainer, store, steps=20)
        learner.replayed = range(1 << 30)  # no engine sampled these tokens
        parameters = list(learner.forward.model.parameters())
        before = [parameter.detach().cpu() for parameter in parameters]
        for step in range(1, 21):
            learner.step(exactness.prepare(learner, path, store, samples, 16384, step))
        after = [parameter.detach().cpu() for parameter in parameters]
        moved = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
        share = moved / sum(parameter.numel() for parameter in parameters)
        changed["exact" if is_exact else "ordinary", master] = share
        del learner, parameters
        gc.collect()  # models are in reference cycles
    print(f"share of weights that changed in 20 steps at lr 1e-6: {changed}")
    exact_share, ordinary_share, without_masters = changed.values()
    assert exact_share > 0.5 * ordinary_share and exact_share > 2 * without_masters
