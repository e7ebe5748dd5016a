"""Decoding on a GPU: graphs give the same results as plain passes, and rows are independent."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sightline.compute.fused_layers import fuse_layers
from sightline.compute.model import load_model
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.row_table import TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

pytestmark = pytest.mark.gpu
LENGTHS = (5, 300, 17, 640, 64, 120, 3, 65, 1200, 33)


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type=request.param, kv_heads=1)
    return tmp_path / "model"


def build(
    model: Path, store: MediaStore, dtype: str, device: str = "cuda", **settings: object
) -> TorchEngine:
    family = load_family(model)
    banned = load_renderer(model, store, family).pad_token_ids
    spec = ServerSpec.of(
        path=model, media_roots=(store.root,), device=device, dtype=dtype, max_num_seqs=16,
        max_model_len=2048, prefill_chunk_tokens=256, **settings,
    )  # fmt: skip
    return build_engine(spec, family, Materializer(family, store, 1 << 20), banned)


def make_requests(prompts: list[np.ndarray]) -> list[TorchRequest]:
    """Answers of different lengths, some greedy, some with filters."""
    return [
        TorchRequest(
            prompt, [], [],
            SamplingParams(
                max_tokens=20 + 30 * (i % 3), temperature=float(i % 2), top_k=5 * (i % 5 == 4)
            ),
            seed=i,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def draw_prompts() -> list[np.ndarray]:
    return [np.arange(i, i + length, dtype=np.int32) % 250 for i, length in enumerate(LENGTHS)]


def ask(engine: TorchEngine, batches: list[list[TorchRequest]]) -> dict[str, float]:
    """Submit a batch whenever the previous one is done. Return the engine's totals."""
    done: queue.SimpleQueue[list[TorchRequest]] = queue.SimpleQueue()
    engine.start(done.put)
    try:
        waiting = 0
        for batch in batches:
            engine.submit(batch)
            waiting += len(batch) - len(done.get(timeout=120))
        while waiting:
            waiting -= len(done.get(timeout=120))
        return engine.totals()
    finally:
        engine.stop()
        engine.join(20)


def check_same(single: list[TorchRequest], other: list[TorchRequest], tolerance: float) -> None:
    for a, b in zip(single, other, strict=True):
        assert a.error is None and b.error is None
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)


def test_cuda_graphs_match_plain_passes(model: Path, store: MediaStore) -> None:
    in_graphs, without = make_requests(draw_prompts()), make_requests(draw_prompts())
    totals = ask(build(model, store, "float32"), [in_graphs[:2], in_graphs[2:]])
    assert totals["steps_replayed"] > 50
    engine = build(model, store, "float32")
    assert engine.runner.decoder is not None
    engine.runner.decoder._captures = False
    assert ask(engine, [without[:2], without[2:]])["steps_replayed"] == 0
    check_same(in_graphs, without, 1e-6)


def test_row_output_does_not_depend_on_other_rows(model: Path, store: MediaStore) -> None:
    together = make_requests(draw_prompts())
    ask(build(model, store, "float32"), [together[i : i + 2] for i in range(0, len(together), 2)])
    alone = make_requests(draw_prompts())
    for i in (1, 3, 4, 9):
        ask(build(model, store, "float32"), [[alone[i]]])
        check_same([alone[i]], [together[i]], 1e-5)


def test_shared_group_prompt_matches_separate_prompts(model: Path, store: MediaStore) -> None:
    group, apart = make_requests([draw_prompts()[3]] * 8), make_requests([draw_prompts()[3]] * 8)
    totals = ask(build(model, store, "float32"), [group])
    assert totals["computed_tokens"] == len(group[0].prompt) + 7
    totals = ask(build(model, store, "float32", enable_prefix_caching=False), [apart])
    assert totals["computed_tokens"] == 8 * len(group[0].prompt)
    check_same(group, apart, 1e-5)


def test_graphs_are_recaptured_when_pages_move(model: Path, store: MediaStore) -> None:
    moving, still = make_requests(draw_prompts()), make_requests(draw_prompts())
    engine = build(model, store, "float32")
    kv = KVCache(16, 2048, torch.device("cuda"), torch.float32, max_new_pages=4)
    engine.runner.use_kv_cache(kv)
    batches = [moving[:2], moving[2:5], moving[5:]]
    assert ask(engine, batches)["steps_replayed"] > 50
    assert kv.generation > 3
    ask(build(model, store, "float32"), [still])
    check_same(moving, still, 1e-5)


def test_other_families_match_the_cpu(tmp_path: Path, store: MediaStore) -> None:
    """A model with latent attention and experts, whose passes may not be capturable."""
    write_tiny("kimi_k25", tmp_path / "model", seed=0)
    on_gpu, on_cpu = make_requests(draw_prompts()), make_requests(draw_prompts())
    ask(build(tmp_path / "model", store, "float32"), [on_gpu[:2], on_gpu[2:]])
    ask(build(tmp_path / "model", store, "float32", device="cpu"), [on_cpu])
    check_same(on_gpu, on_cpu, 1e-3)


def test_fused_layers_match_the_model(model: Path) -> None:
    family = load_family(model)
    values = []
    for is_fused in (False, True):
        forward = load_model(model, family, "cuda", "bfloat16")
        if is_fused:
            assert fuse_layers(forward.model) >= 4 * len(forward.model.model.language_model.layers)
        from sightline.compute.attention import PackedPattern

        ids = torch.arange(40, device="cuda")[None]
        positions = torch.arange(40, device="cuda").expand(family.num_axes, 1, 40)
        pattern = PackedPattern([40], torch.device("cuda"))
        with torch.inference_mode():
            values.append(forward.hidden(ids, positions, None, None, pattern).float())
    difference = (values[0] - values[1]).norm() / values[0].norm()
    assert difference < 1e-2


def test_fused_vision_tower_matches_the_model(model: Path) -> None:
    family, outputs = load_family(model), []
    grids = [(1, 8, 8), (1, 4, 12)]
    values = 3 * family.patch**2  # type: ignore[attr-defined]
    patches = torch.arange((64 + 48) * values, device="cuda").remainder(251).to(torch.uint8)
    for is_fused in (False, True):
        forward = load_model(model, family, "cuda", "bfloat16")
        if is_fused:
            fuse_layers(forward.model)
            blocks = forward._tower.blocks  # type: ignore[attr-defined]
            assert all("_build_image_attention" in str(b.attn.forward) for b in blocks)
        with torch.inference_mode():
            outputs.append(forward.encode(patches.view(-1, values), grids).float())
    difference = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert difference < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(16, 8, 128, 128), (4, 4, 24, 16)])
def test_paged_attention_is_correct_and_batch_invariant(
    dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    from sightline.compute.triton_kernels import attend_paged

    num, kv, width, value_width = heads
    torch.manual_seed(0)
    device = torch.device("cuda")
    keys = torch.randn(80, 64, kv, width, device=device).to(dtype)
    values = torch.randn(80, 64, kv, value_width, device=device).to(dtype)
    lengths = torch.tensor([1, 64, 65, 1500, 0, 900], device=device)
    tables = torch.randperm(80, device=device)[:72].int().view(3, 24).repeat(2, 1)
    q = torch.randn(len(lengths), num, width, device=device).to(dtype)
    out = attend_paged(q, keys, values, tables, lengths, width**-0.5)
    for row, count in enumerate(lengths.tolist()):
        if not count:
            assert not out[row].any()
            continue
        part = slice(row, row + 1)
        narrow = tables[part, : -(-count // 64)].contiguous()
        alone = attend_paged(q[part], keys, values, narrow, lengths[part], width**-0.5)
        assert torch.equal(alone[0], out[row])
        k, v = (x[tables[row].long()].flatten(0, 1)[:count].double() for x in (keys, values))
        k, v = (x.transpose(0, 1).repeat_interleave(num // kv, dim=0)[None] for x in (k, v))
        expected = F.scaled_dot_product_attention(q[row].double()[None, :, None], k, v)[0, :, 0]
        error = (out[row].double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_kernels_round_like_transformers() -> None:
    from sightline.compute.triton_kernels import rms_norm, rotate_heads, silu_mul

    torch.manual_seed(0)
    x = torch.randn(9, 8 * 128, device="cuda").bfloat16()
    weight = torch.randn(128, device="cuda").bfloat16()
    cos, sin = (torch.randn(9, 128, device="cuda").bfloat16() for _ in range(2))

    def normalize(heads: torch.Tensor) -> torch.Tensor:
        wide = heads.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.bfloat16()

    heads = normalize(x.view(9, 8, 128))
    assert torch.equal(rms_norm(x.view(9, 8, 128), weight, 1e-6), heads)
    turned = torch.cat([-heads[..., 64:], heads[..., :64]], dim=-1)
    expected = (heads * cos[:, None] + turned * sin[:, None])[:, :6]
    q, k = x[:, : 4 * 128], x[:, 4 * 128 : 6 * 128]
    rotated = torch.cat(rotate_heads(q, k, cos, sin, (weight, weight), 1e-6), dim=1)
    assert torch.equal(rotated, expected)
    assert torch.equal(silu_mul(*x.chunk(2, dim=-1)), F.silu(x[:, :512]) * x[:, 512:])


def test_sampled_tokens_follow_the_distribution_and_avoid_banned_ids() -> None:
    from sightline.compute.triton_kernels import sample_tokens

    torch.manual_seed(0)
    logits = (3 * torch.randn(400, 5000, device="cuda")).bfloat16()
    banned = torch.rand(5000, device="cuda") < 0.1
    temperature = torch.arange(400, device="cuda") % 4 / 2.0
    uniform = torch.rand(400, dtype=torch.float64, device="cuda")
    tokens, logprobs = sample_tokens(logits, banned, temperature, uniform)
    heat = torch.where(temperature > 0, temperature, 1)[:, None]
    logs = (logits.float().masked_fill(banned, float("-inf")) / heat).double().log_softmax(-1)
    sums = logs.exp().cumsum(-1)
    drawn = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0]
    assert torch.equal(tokens, torch.where(temperature > 0, drawn, logs.argmax(-1)))
    expected = logs.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-6)
    logits[3] = float("nan")
    assert sample_tokens(logits, banned, temperature, uniform)[1][3].isnan()
