"""`[model] exact = true`: batch invariance. A token's result depends only on its own sequence.

Sampler and trainer load their model here and compute with the same functions. Operations between
matrix products already work row by row. For matrix products, libraries choose a kernel by the
number of rows, so products use row counts at which a row always has the same bits. A trial at load
checks this. On a CPU all products have `ROWS` rows and one thread computes. A pass has a multiple
of `ROWS` tokens, because different instructions compute the last few values of a vector. Each image
goes through the vision tower alone. On CUDA images go through the tower together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from sightline.compute.attention import AttentionPattern
from sightline.compute.attention_exact import ExactPattern, without_onednn
from sightline.compute.attention_shapes import Attended, Keys, Queries, Values
from sightline.compute.fused_layers import fuse_layers
from sightline.errors import ConfigError
from sightline.families import Family, Forward

ROWS = 64
"""Number of rows of a product on a CPU."""
MIN_ROWS = (1, 256, 512, 1024)
"""Candidates for the minimum number of rows on CUDA. The first that passes the trial is used."""
MAX_ROWS = 8192
"""Maximum number of rows of a product on CUDA. Larger products are computed in parts."""
ALIGNED_OUTPUTS = 8
"""The number of outputs on CUDA is padded to a multiple of this: 16 bytes in bfloat16."""
TRIED_ROWS = (1, 2, 3, 7, 16, 64, 257, 1000, MAX_ROWS)
TRIED_TOKENS = 130
TRIED_IMAGES = ((5, 7), (1, 1), (16, 20))
"""Rows and columns of images, in merged patches."""
MAX_TRIED = 1 << 28
DTYPES = {"cuda": {torch.bfloat16}, "cpu": {torch.float32, torch.bfloat16}}
Product = Callable[..., Tensor]
"""`F.linear`, or a product with the same arguments."""


def make_exact(forward: Forward, family: Family, device: torch.device, dtype: torch.dtype) -> None:
    """Make a loaded model exact, in place, for arithmetic in `dtype` on `device`. Parameters keep
    their names. Raise ConfigError if the model does not support it."""
    _check_kind(forward, device, dtype)
    vision = {id(parameter) for _, parameter in forward.vision_parameters()}
    if device.type == "cpu":
        torch.set_num_threads(1)
        forward.hidden = partial(_pad_tokens, forward.hidden)  # type: ignore[method-assign]
        forward.encode = partial(_encode_each, forward.encode)  # type: ignore[method-assign]
    else:
        fuse_layers(forward.model, exact=True)
    rows_by_shape: dict[tuple[int, ...], tuple[int, int]] = {}
    for name, module in forward.model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if not (is_linear or is_patch_embedding(module)) or (
            device.type == "cpu" and id(module.weight) in vision
        ):
            continue
        weight: Any = module.weight
        shape = (*weight.flatten(1).shape, module.bias is not None)
        if shape not in rows_by_shape:
            rows_by_shape[shape] = find_rows(name, module, device, dtype)
        least, most = rows_by_shape[shape]
        product = partial(_multiply_with_gradient, least=least, most=most)
        if is_linear:
            module.forward = partial(_forward_linear, module, product)
        else:
            module.forward = partial(embed_patches, module, module.forward, product)
    parameter = next(forward.model.parameters())
    if not parameter.is_meta and parameter.dtype == dtype:  # otherwise a server runs the trial
        _try_pass(forward, family, device, dtype)
        _try_images(forward, device)


def _check_kind(forward: Forward, device: torch.device, dtype: torch.dtype) -> None:
    if dtype not in DTYPES.get(device.type, ()):
        problem = f"[model] exact = true does not work with {dtype} on {device.type}"
        raise ConfigError(problem, 'set dtype = "bfloat16"')
    convolutions = [m for m in forward.model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    inside = {id(p) for module in convolutions for p in module.parameters()}
    stacked = [n for n, p in forward.model.named_parameters() if p.ndim > 2 and id(p) not in inside]
    if stacked:
        why = "which holds several matrices: the number of rows of each depends on other rows"
        problem = f"[model] exact = true does not work with {stacked[0]}, {why}"
        raise ConfigError(problem, "choose a model without experts, or remove exact")


# --- products of matrices


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, least: int, most: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(x, weight, bias, least, most)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        needs = ctx.needs_input_grad
        x_grad = grads[0] @ weight if needs[0] else None
        weight_grad = grad.T @ x.flatten(0, -2) if needs[1] else None
        bias_grad = grad.sum(0) if ctx.has_bias and needs[2] else None
        return x_grad, weight_grad, bias_grad, None, None


def _multiply_with_gradient(
    x: Tensor, weight: Tensor, bias: Tensor | None, least: int, most: int
) -> Tensor:
    if not torch.is_grad_enabled():
        return multiply(x, weight, bias, least, most)
    return _ExactLinear.apply(x, weight, bias, least, most)


def _forward_linear(module: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return product(x, module.weight, module.bias)


def is_patch_embedding(module: nn.Module) -> bool:
    """Return whether the module computes one row from each patch."""
    return (
        isinstance(module, nn.Conv2d | nn.Conv3d)
        and module.kernel_size == module.stride
        and module.groups == 1
        and not any(module.padding)
        and all(step == 1 for step in module.dilation)
    )


def embed_patches(
    module: Any,
    convolve: Callable[[Tensor], Tensor],
    product: Product,
    x: Float[Tensor, "patches channels *size"],
) -> Float[Tensor, "patches hidden *ones"]:
    """Compute a patch embedding as one matrix product if `x` has one patch per row."""
    if x.shape[2:] != module.kernel_size:
        return convolve(x)
    out = product(x.flatten(1), module.weight.flatten(1), module.bias)
    return out.view(*out.shape, *(1 for _ in module.kernel_size))


def multiply(
    x: Float[Tensor, "*rows inner"],
    weight: Float[Tensor, "outer inner"],
    bias: Float[Tensor, " outer"] | None,
    least: int,
    most: int,
) -> Float[Tensor, "*rows outer"]:
    """Compute `F.linear` as products of `least` to `most` rows, padded with zeros.

    On CUDA the outputs are padded to a multiple of `ALIGNED_OUTPUTS`. For other sizes, cuBLAS uses
    kernels whose sums depend on the number of rows.
    """
    rows, outer = x.reshape(-1, x.shape[-1]), len(weight)
    if x.is_cuda and (missing := -outer % ALIGNED_OUTPUTS):
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    with contextlib.nullcontext() if x.is_cuda else without_onednn():
        product = x.new_empty(len(rows), len(weight))
        for part, place in zip(rows.split(most), product.split(most), strict=True):
            if len(part) < least:
                filled = F.pad(part, (0, 0, 0, least - len(part)))
                place.copy_(F.linear(filled, weight, bias)[: len(part)])
            elif bias is None:
                torch.mm(part, weight.T, out=place)
            else:
                torch.addmm(bias, part, weight.T, out=place)
    return product[:, :outer].reshape(*x.shape[:-1], outer)


def find_rows(name: str, module: Any, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Return the minimum and maximum rows of a product for which a row always has the same bits."""
    outer, inner = module.weight.flatten(1).shape
    choices = [(ROWS, ROWS)] if device.type == "cpu" else [(least, MAX_ROWS) for least in MIN_ROWS]
    tried = [n for n in TRIED_ROWS if n * max(outer, inner) <= MAX_TRIED and n <= 8 * choices[0][1]]
    generator = torch.Generator(device).manual_seed(0)  # keeps the process's random state

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype, generator=generator) - 0.5

    x = draw(tried[-1], inner)
    bias = None if module.bias is None else draw(outer)
    is_empty = module.weight.is_meta
    weight = draw(outer, inner) if is_empty else module.weight.detach().flatten(1).to(dtype)
    varying = 0
    with torch.no_grad():
        for choice in choices:
            reference = multiply(x, weight, bias, *choice)
            bad = [n for n in tried if not _is_same(x, reference, n, weight, bias, *choice)]
            if not bad:
                return choice
            varying = bad[0]
    raise ConfigError(
        f"[model] exact = true does not work on this {device.type}: a row of {name} ({outer} x "
        f"{inner}) has different bits among {varying} rows than among {tried[-1]}",
        "remove exact, or use another device or another version of torch",
    )


def _is_same(x: Tensor, whole: Tensor, num: int, *how: Any) -> bool:
    """Return whether the first and last `num` rows, computed alone, equal those of `whole`."""
    first, last = multiply(x[:num], *how), multiply(x[-num:], *how)
    return torch.equal(first, whole[:num]) and torch.equal(last, whole[-num:])


# --- passes


class _PaddedPattern:
    """A pattern for the first `length` tokens of a pass. The others attend to nothing."""

    def __init__(self, pattern: AttentionPattern, length: int) -> None:
        self._pattern, self._length, self.state = pattern, length, pattern.state

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        missing = q.shape[2] - self._length
        q, k, v = (x[:, :, : self._length] for x in (q, k, v))
        return F.pad(self._pattern.attend(layer, q, k, v, scaling), (0, 0, 0, missing))


def _pad_tokens(
    hidden: Any,
    token_ids: Int[Tensor, "rows=1 length"],
    positions: Int[Tensor, "axes rows=1 length"],
    features: Tensor | None,
    feature_indices: Tensor | None,
    attention: AttentionPattern,
) -> Float[Tensor, "rows=1 length hidden"]:
    length = token_ids.shape[1]
    missing = -length % ROWS
    padded = (F.pad(x, (0, missing)) for x in (token_ids, positions))
    pattern = _PaddedPattern(attention, length)
    states: Tensor = hidden(*padded, features, feature_indices, pattern)
    return states[:, :length]


def _encode_each(encode: Any, patches: Tensor, grids: list[Any]) -> Tensor:
    parts = patches.split([math.prod(grid) for grid in grids])
    encoded = [encode(part, [grid]) for part, grid in zip(parts, grids, strict=True)]
    return encoded[0] if len(encoded) == 1 else torch.cat(encoded)


@torch.no_grad()
def _try_pass(forward: Forward, family: Family, device: torch.device, dtype: torch.dtype) -> None:
    """Raise unless a sequence has the same hidden states alone and in a pack."""
    before, after = 3, 77
    ids = torch.arange(TRIED_TOKENS, device=device)
    axes = torch.from_numpy(family.positions(TRIED_TOKENS, ())[0]).to(device).long()

    def compute(at: list[slice]) -> Tensor:
        lengths = [len(ids[part]) for part in at]
        token_ids = torch.cat([ids[part] for part in at])[None]
        positions = torch.cat([axes[:, part] for part in at], dim=1)[:, None]
        pattern = ExactPattern(lengths, device, dtype)
        return forward.hidden(token_ids, positions, None, None, pattern)[0]

    alone = compute([slice(None)])
    among = compute([slice(before), slice(None), slice(after)])[before : before + TRIED_TOKENS]
    if not torch.equal(alone, among):
        raise ConfigError(
            f"[model] exact = true does not work on this {device.type}: results of {TRIED_TOKENS} "
            f"tokens change when {before} and {after} others surround them, by up to "
            f"{float((alone - among).abs().max()):.2g}: an operation depends on the rest of a pass",
            "remove exact, or use another device or another version of torch",
        )


@torch.no_grad()
def _try_images(forward: Forward, device: torch.device) -> None:
    """Raise unless an image has the same features alone and in a batch."""
    if (blank := forward.blank_image()) is None or device.type == "cpu":
        return
    (num_patches, values), (_, high, wide) = blank[0].shape, blank[1]
    grids = [(1, high * rows, wide * columns) for rows, columns in TRIED_IMAGES]
    total = num_patches * sum(rows * columns for rows, columns in TRIED_IMAGES)
    drawn = (torch.arange(total * values, device=device).sin() * 127 + 128).to(torch.uint8)
    patches = list(drawn.view(total, values).split([math.prod(grid) for grid in grids]))
    alone = [forward.encode(part, [grid]) for part, grid in zip(patches, grids, strict=True)]
    among = forward.encode(torch.cat(patches), grids)
    if not torch.equal(torch.cat(alone), among):
        raise ConfigError(
            f"[model] exact = true does not work on this {device.type}: images' features differ "
            f"alone and together, by up to {float((torch.cat(alone) - among).abs().max()):.2g}",
            "remove exact, or use another device or another version of torch",
        )
