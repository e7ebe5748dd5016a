"""Fused CUDA layers for transformers' models, either without gradients or exact.

A decode step reads each weight once, which takes a millisecond or two. Hundreds of kernels that
each process a few rows take longer. Matrices with the same input are joined, and our own kernels
compute the operations between matrix products, with transformers' rounding. A module is replaced
only if the replacement gives the same result in a trial.

Exact layers (`[model] exact`) are batch-invariant, in a trainer too. Their matrices are not joined,
because each is sharded separately, and their gradients come from plain formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sightline.compute.attention import AttentionPattern, attend_images, attend_images_exact
from sightline.compute.lora_weights import add_adapter
from sightline.compute.plain_gradient import call_exact

TRIAL_TOKENS = 5
TOLERANCE = 1e-2
"""Maximum error relative to the norm of the original output: twice bfloat16's rounding."""


def fuse_layers(model: nn.Module, exact: bool = False) -> int:
    """Replace supported forward passes in place, and return their number. Parameters keep their
    names and can be written in place."""
    fused = 0
    same: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if same.get(kind) is False or (build := _find_replacement(module, exact)) is None:
            continue
        before, after = module.forward, build(module, exact)
        if kind not in same:
            # Meta tensors cannot be tested. A server of the same model runs the trial.
            is_empty = next(module.parameters()).is_meta
            same[kind] = is_empty or _matches(module, before, after)
        if same[kind]:
            module.forward = after
            fused += 1
    return fused


def _find_replacement(module: Any, exact: bool) -> Callable[[Any, bool], Callable[..., Any]] | None:
    width, weight = (getattr(module, name, None) for name in ("head_dim", "weight"))
    # The kernel processes a head as one block, whose width must be a power of two in Triton.
    is_block = isinstance(width, int) and width.bit_count() == 1
    if _is_plain(module, "q_proj", "k_proj", "v_proj", "o_proj"):
        # Gated queries and sliding windows are not supported.
        is_gated = module.q_proj.out_features != module.o_proj.in_features
        if is_block and not is_gated and not getattr(module, "sliding_window", None):
            return _build_attention
    elif _is_plain(module, "gate_proj", "up_proj", "down_proj"):
        act = getattr(module, "act_fn", None)
        if isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation":
            return _build_mlp
    elif _is_plain(module, "qkv", "proj"):
        if is_block:
            return _build_image_attention
    elif exact and type(module) is nn.LayerNorm and module.bias is not None:
        return _build_layer_norm
    elif hasattr(module, "variance_epsilon") and isinstance(weight, nn.Parameter):
        return _build_norm
    return None


def _is_plain(module: Any, *names: str) -> bool:
    """Return whether the module has these linear layers, with consistent biases."""
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    return len({layer.bias is None for layer in layers[:-1]}) == 1


def _join(exact: bool, *layers: nn.Linear) -> Callable[[Tensor], Sequence[Tensor]]:
    """Join layers into one matrix and bias. Their own parameters become views of it."""
    if exact:
        return lambda x: [layer(x) for layer in layers]

    def join(parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat([part.detach() for part in parts])
        for part, place in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = place
        return joined

    weight = join([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias, sizes = join(biases) if biases else None, [len(layer.weight) for layer in layers]
    return lambda x: [
        add_adapter(layer, (x,), y)
        for layer, y in zip(layers, F.linear(x, weight, bias).split(sizes, -1), strict=True)
    ]


def _build_norm(module: Any, exact: bool) -> Callable[[Tensor], Tensor]:
    from sightline.compute.triton_kernels import rms_norm

    run, plain = (partial(f, eps=module.variance_epsilon) for f in (rms_norm, plain_norm))
    return lambda hidden_states: call_exact(run, plain, hidden_states, module.weight)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return weight * value.to(x.dtype)


def _build_layer_norm(module: Any, exact: bool) -> Callable[[Tensor], Tensor]:
    plain = partial(plain_layer_norm, eps=module.eps)
    return lambda x: call_exact(plain, plain, x, module.weight, module.bias)


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _build_mlp(module: Any, exact: bool) -> Callable[[Tensor], Tensor]:
    from sightline.compute.triton_kernels import silu_mul

    joined, plain = _join(exact, module.gate_proj, module.up_proj), partial(plain_silu_mul)
    return lambda x: module.down_proj(call_exact(silu_mul, plain, *joined(x)))


def plain_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _build_attention(module: Any, exact: bool) -> Callable[..., tuple[Tensor, None]]:
    from sightline.compute.triton_kernels import rotate_heads

    joined = _join(exact, module.q_proj, module.k_proj, module.v_proj)
    width = int(module.head_dim)
    has_norms = hasattr(module, "q_norm") and hasattr(module, "k_norm")
    eps = float(module.q_norm.variance_epsilon) if has_norms else 0.0

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor) -> Any:
        weights = (norms[0], norms[1]) if norms else None
        return rotate_heads(q, k, cos, sin, weights, eps)

    plain = partial(plain_rotate, eps=eps)

    def attend(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        pattern: AttentionPattern,
        **options: Any,
    ) -> tuple[Tensor, None]:
        shape = hidden_states.shape[:-1]
        q, k, v = (x.flatten(0, 1) for x in joined(hidden_states))
        cos, sin = (x.reshape(-1, width) for x in position_embeddings)
        norms = (module.q_norm.weight, module.k_norm.weight) if has_norms else ()
        q, k = call_exact(rotate, plain, q, k, cos, sin, *norms)
        v = v.unflatten(1, (-1, width))
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
        out = pattern.attend(int(module.layer_idx), q, k, v, float(module.scaling))
        return module.o_proj(out.transpose(1, 2).reshape(*shape, -1)), None

    return attend


def _build_image_attention(module: Any, exact: bool) -> Callable[..., Tensor]:
    """Fuse a vision tower's attention, whose rotary embedding is in float32."""
    from sightline.compute.triton_kernels import rotate_heads

    width = int(module.head_dim)
    rotate, plain = partial(rotate_heads, rounds=False), partial(plain_rotate, rounds=False)
    attend_among = attend_images_exact if exact else attend_images

    def attend(
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **options: Any,
    ) -> Tensor:
        q, k, v = module.qkv(hidden_states).chunk(3, dim=-1)
        cos, sin = (x.contiguous() for x in position_embeddings)
        q, k = call_exact(rotate, plain, q, k, cos, sin)
        v = v.unflatten(1, (-1, width))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        longest = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
        out = attend_among(q, k, v, float(module.scaling), cu_seqlens, longest)
        return module.proj(out.squeeze(0).transpose(0, 1).flatten(1))

    return attend


def plain_rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *norms: Tensor,
    eps: float = 0.0, rounds: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `rotate_heads` with plain torch operations."""

    def rotate(x: Tensor) -> Tensor:
        low, high = (x if rounds else x.float()).chunk(2, dim=-1)
        angles = (angle[:, None].chunk(2, dim=-1) for angle in (cos, sin))
        (cos_low, cos_high), (sin_low, sin_high) = angles
        turned = low * cos_low - high * sin_low, high * cos_high + low * sin_high
        return torch.cat(turned, dim=-1).to(q.dtype)

    parts = [x.unflatten(1, (-1, cos.shape[-1])) for x in (q, k)]
    if norms:
        parts = [plain_norm(x, w, eps) for x, w in zip(parts, norms, strict=True)]
    return rotate(parts[0]), rotate(parts[1])


# --- the trial


class _TrialPattern:
    """A pattern whose output depends on queries, keys and values alike."""

    state = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return q * k + v


def _matches(module: Any, before: Callable[..., Any], after: Callable[..., Any]) -> bool:
    weight = next(module.parameters())

    def draw(*shape: int) -> Tensor:  # deterministic, to keep the process's random state
        values = torch.arange(math.prod(shape), device=weight.device).view(shape)
        return values.sin().to(weight.dtype)

    options: dict[str, Any] = {}
    x = draw(1, TRIAL_TOKENS, weight.shape[-1])
    if hasattr(module, "qkv"):
        angles = draw(TRIAL_TOKENS, module.head_dim // 2).float().repeat(1, 2)
        ends = torch.tensor([0, 2, TRIAL_TOKENS], dtype=torch.int32, device=weight.device)
        options = {"cu_seqlens": ends, "max_seqlen": TRIAL_TOKENS - 2}
        options["position_embeddings"] = angles.cos(), angles.sin()
        x = x[0]
    if hasattr(module, "q_proj"):
        angles = draw(1, TRIAL_TOKENS, module.head_dim // 2).float().repeat(1, 1, 2)
        cos_sin = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
        options = {"attention_mask": None, "pattern": _TrialPattern()}
        options["position_embeddings"] = cos_sin
    try:
        with torch.no_grad():
            old, new = before(x, **options), after(x, **options)
    except (RuntimeError, ValueError, TypeError, KeyError):
        return False
    if isinstance(old, tuple):
        old, new = old[0], new[0]
    return bool((old - new).float().norm() <= TOLERANCE * old.float().norm())
