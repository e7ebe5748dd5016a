"""Experts compute in grouped products, and a router replays the experts that a sampler chose."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sightline.compute.model import load_model
from sightline.errors import FamilyError, Misaligned
from sightline.families import load_family
from sightline.families.experts import GROUPED, ExpertRouting, weigh
from sightline.families.registry import write_tiny

KINDS = {
    "qwen3_vl_moe": ("qwen_vl", {"type": "qwen3_vl_moe"}),
    "qwen3_moe": ("qwen_vl", {"type": "qwen3_moe"}),
    "qwen3_5_moe": ("qwen_vl", {"type": "qwen3_5_moe"}),
    "glm4v_moe": ("glm_v", {"type": "glm4v_moe"}),
    "kimi_k25": ("kimi_k25", {}),
}


def load(path: Path, device: str = "cpu") -> Any:
    return load_model(path, load_family(path), device, "float32")


@pytest.fixture(scope="module", params=KINDS)
def forward(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, options = KINDS[request.param]
    path = tmp_path_factory.mktemp("models") / str(request.param)
    write_tiny(family, path, seed=0, **options)
    return load(path)


def blocks_of(forward: Any) -> list[Any]:
    return [m for m in forward.model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]


def test_all_experts_compute_in_grouped_products(forward: Any) -> None:
    blocks = blocks_of(forward)
    assert blocks
    assert {block.experts.config._experts_implementation for block in blocks} == {GROUPED}


@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_grouped_products_equal_the_loop(forward: Any, num_tokens: int) -> None:
    experts = blocks_of(forward)[0].experts
    draws = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, experts.gate_up_proj.shape[-1], generator=draws)
    # The first expert gets no token.
    chosen = torch.stack([torch.randperm(3, generator=draws)[:2] + 1 for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2, generator=draws)
    upstream = torch.randn(hidden.shape, generator=draws)
    results = {}
    for way in ("eager", GROUPED):
        experts.config._experts_implementation = way
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        experts.zero_grad()
        out = experts(x, chosen, w)
        out.backward(upstream)
        gradients = [parameter.grad.clone() for parameter in experts.parameters()]
        results[way] = [out.detach(), x.grad, w.grad, *gradients]
    for looped, grouped in zip(results["eager"], results[GROUPED], strict=True):
        torch.testing.assert_close(grouped, looped, rtol=1e-6, atol=1e-6)


def test_replaying_a_routers_own_choice_changes_no_bit(forward: Any) -> None:
    routing = forward.routing
    for block in blocks_of(forward):
        hidden = torch.randn(9, block.gate.hidden_dim)
        routing.use(None, replays=True)
        logits, weights, own = block.gate(hidden)
        assert torch.equal(weigh(block.gate, logits, own), weights)
        routes = routing.get_routes()
        routing.use(routes, replays=True)
        again = block.gate(hidden)
        assert all(map(torch.equal, again, (logits, weights, own)))
        assert routing.count_differing()[0] == 0


def test_router_uses_the_given_experts_with_its_own_weights(forward: Any) -> None:
    routing, gate = forward.routing, blocks_of(forward)[-1].gate
    hidden = torch.randn(5, gate.hidden_dim)
    routing.use(None, replays=True)
    own = gate(hidden)[2]
    routes = torch.zeros(5, routing.num_layers, 2, dtype=routing.dtype)
    routes[:, :] = torch.tensor([0, 3])
    routes[4] = routing.no_route
    routing.use(routes, replays=True)
    logits, weights, chosen = gate(hidden)
    assert chosen[:4].tolist() == [[0, 3]] * 4 and torch.equal(chosen[4], own[4])
    assert torch.equal(weights, weigh(gate, logits, chosen))
    differs = sum(set(row) != {0, 3} for row in own[:4].tolist())
    assert routing.count_differing().tolist() == [differs, 4]
    weights[:, 0].sum().backward()
    assert gate.weight.grad.abs().sum() > 0


def test_routes_of_another_model_are_refused(forward: Any) -> None:
    routing = forward.routing
    wrong = torch.zeros(5, routing.num_layers, routing.top_k + 1, dtype=routing.dtype)
    with pytest.raises(Misaligned, match="but the model has"):
        routing.use(wrong, replays=True)
    routing.use(wrong[..., :-1], replays=True)
    with pytest.raises(Misaligned, match="5 tokens have routes, but the layer computes 4"):
        blocks_of(forward)[0].gate(torch.randn(4, blocks_of(forward)[0].gate.hidden_dim))


ROUTERS = (
    ("minimax_m3_vl", "MiniMaxM3VLTopKRouter", True),  # without a factor
    ("qwen4_exp", "Qwen4ExpTextTopKRouter", True),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeTopKRouter", True),
    ("mistral4", "Mistral4TopkRouter", False),  # a softmax with a factor
    ("deepseek_ocr2", "DeepseekOcr2TextTopkRouter", False),
    ("inkling", "InklingTopkRouter", False),  # returns more
)


@pytest.mark.parametrize(("kind", "name", "is_known"), ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_routers_with_known_weights_replay(
    kind: str, name: str, is_known: bool, dtype: torch.dtype
) -> None:
    same = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    config = SimpleNamespace(
        **same, hidden_size=16, num_experts_per_tok=2, norm_topk_prob=True, n_group=1, topk_group=1,
        routed_scaling_factor=2.5, topk_method="greedy", moe_norm_min=1e-12, moe_num_experts=4,
        n_shared_experts=1, route_scale=1.0,
    )  # fmt: skip
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    router = getattr(module, name)(config).to(dtype)
    torch.nn.init.normal_(router.weight)
    block = SimpleNamespace(experts=None, gate=router)
    text = SimpleNamespace(layers=[SimpleNamespace(mlp=None), SimpleNamespace(mlp=block)])
    routing = ExpertRouting.find(text)
    assert (routing is not None) == is_known
    if routing is not None:
        hidden = torch.randn(9, 16, dtype=dtype)
        _, weights, own = router(hidden)
        routing.use(routing.get_routes(), replays=True)
        _, again, chosen = router(hidden)
        assert torch.equal(chosen, own) and again.dtype == weights.dtype
        torch.testing.assert_close(again, weights, rtol=1e-2, atol=0)


def test_dense_model_has_no_routing(tiny_model: Path) -> None:
    assert load(tiny_model).routing is None


def test_auxiliary_loss_is_refused(tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path / "other", seed=0, type="qwen3_moe")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"output_router_logits": True}))
    with pytest.raises(FamilyError, match="router_aux_loss_coef"):
        load(tmp_path / "other")
    path.write_text(
        json.dumps(config | {"output_router_logits": True, "router_aux_loss_coef": 0.0})
    )
    load(tmp_path / "other")


def test_large_numbers_of_experts_are_recorded_in_int16(forward: Any) -> None:
    assert (forward.routing.dtype, forward.routing.no_route) == (torch.uint8, 255)
    layers = list(forward._text.layers)
    for block in blocks_of(forward):
        block.gate.num_experts = 256
    assert ExpertRouting(layers).no_route == np.iinfo(np.int16).max
    for block in blocks_of(forward):
        block.gate.num_experts = 4
    forward.routing = ExpertRouting(layers)
