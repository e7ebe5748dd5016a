"""Gated delta nets over packs: a token's result equals that at the end of its path alone."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5 import modeling_qwen3_5 as witness
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from sightline.families.gated_delta_net import (
    MAX_CHUNK,
    _find_kernel,
    apply_delta_rule,
    build_recurrence_plan,
    find_parents,
    pack_delta_nets,
)

CPU = torch.device("cpu")
HIDDEN, WINDOW = 24, 4


def lay_out(node: tuple[int, list[Any]], start: int = 0) -> list[int]:
    """`subtree_end` of a tree: the tokens of a node, and its children."""
    length, children = node
    below: list[int] = []
    for child in children:
        below += lay_out(child, start + length + len(below))
    return [start + length + len(below)] * length + below


def draw_tree(rng: random.Random, depth: int) -> tuple[int, list[Any]]:
    length = rng.choice((1, 2, 3, 5, MAX_CHUNK - 1, MAX_CHUNK, MAX_CHUNK + 1, 2 * MAX_CHUNK + 7))
    forks = rng.choice((0, 2, 3)) if depth else 0
    return length, [draw_tree(rng, depth - 1) for _ in range(forks)]


def draw_pack(seed: int) -> np.ndarray:
    """Return trees of several depths, and sequences without a branch."""
    rng = random.Random(seed)
    ends: list[int] = []
    for depth in (2, 0, 1, 0):
        ends += lay_out(draw_tree(rng, depth), len(ends))
    return np.array(ends)


def find_paths(subtree_end: np.ndarray) -> list[list[int]]:
    """From each root to each leaf, by the definition: a token sees k when k <= it < end of k."""
    total = len(subtree_end)
    sees = [[k for k in range(t + 1) if t < subtree_end[k]] for t in range(total)]
    inner = {path[-2] for path in sees if len(path) > 1}
    return [path for path in sees if path[-1] not in inner]


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=WINDOW,
    )
    module = witness.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        module.conv1d.weight.mul_(3)
    return module


@pytest.mark.parametrize("seed", range(3))
def test_parent_is_the_previous_token_on_the_path(seed: int) -> None:
    ends = draw_pack(seed)
    parents = find_parents(ends)
    for path in find_paths(ends):
        assert parents[path].tolist() == [-1, *path[:-1]]


@pytest.mark.parametrize("seed", range(3))
def test_packed_paths_match_transformers_on_separate_paths(layer: Any, seed: int) -> None:
    ends = draw_pack(seed)
    hidden, wanted = torch.randn(2, 1, len(ends), HIDDEN).unbind()
    hidden.requires_grad_()
    inputs = [hidden, *layer.parameters()]
    alone, apart = torch.empty_like(hidden), torch.zeros(sum(x.numel() for x in inputs))
    computed = np.zeros(len(ends), dtype=bool)
    for path in find_paths(ends):
        output = layer(hidden[:, path])
        new = ~computed[path]  # a token that two paths share counts once
        computed[path] = True
        alone.data[:, path] = output.detach()
        apart += gradients((output * wanted[:, path])[:, new].sum(), inputs)
    assert pack_delta_nets(layer) == WINDOW
    out = layer(hidden, recurrence=build_recurrence_plan(ends, WINDOW, CPU))
    torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)
    together = gradients((out * wanted).sum(), inputs)
    assert float((together - apart).norm() / apart.norm()) < 1e-5


def gradients(loss: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return all of them as one vector."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, inputs)])


def test_state_leaks_between_sequences_without_a_plan(layer: Any) -> None:
    """transformers' own layers carry the state of the first sequence into the second."""
    hidden = torch.randn(1, 12, HIDDEN)
    with torch.no_grad():
        together, second = layer(hidden), layer(hidden[:, 6:])
    assert float((together[:, 6:] - second).abs().max()) > 1e-3


def rule_of_a_package(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Compute the result of flash-linear-attention, which itself needs a GPU."""
    bounds = cu_seqlens.numpy()
    plan = build_recurrence_plan(np.repeat(bounds[1:], np.diff(bounds)), WINDOW, CPU)
    return apply_delta_rule(q[0], k[0], v[0], g[0], beta[0], plan)[None], None


def refuse(*inputs: Any, **options: Any) -> Any:
    raise RuntimeError("this Triton computes wrong gradients on this GPU")


def without_gradient_of_values(*inputs: Any, **options: Any) -> Any:
    q, k, v = inputs
    out, state = rule_of_a_package(q, k, v.detach(), **options)
    return out + 0 * v, state


def install_package(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["fla", "fla.ops", "fla.ops.gated_delta_rule"]
    package = [ModuleType(name) for name in names]
    package[-1].__dict__["chunk_gated_delta_rule"] = rule
    for name, module in zip(names, package, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    _find_kernel.cache_clear()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (rule_of_a_package, ""),
        (refuse, "RuntimeError: this Triton computes wrong gradients"),
        (without_gradient_of_values, "its gradients of v differ from plain torch's by"),
    ],
)
def test_package_kernels_are_used_only_after_a_matching_trial(
    rule: Any, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_package(rule, monkeypatch)
    try:
        kernel = _find_kernel(8, 16, CPU, torch.bfloat16)
    finally:
        _find_kernel.cache_clear()
    assert kernel is (None if problem else rule)
    errors = capsys.readouterr().err
    assert problem in errors if problem else not errors


def test_trial_does_not_affect_activation_recomputation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_package(rule_of_a_package, monkeypatch)

    def block(x: Tensor) -> Tensor:
        assert _find_kernel(8, 16, CPU, torch.bfloat16) is rule_of_a_package
        return x.sin().square()

    x = torch.ones(3, requires_grad=True)
    try:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    finally:
        _find_kernel.cache_clear()
    torch.testing.assert_close(x.grad, torch.sin(2 * torch.ones(3)))
    assert not capsys.readouterr().err
