"""Gated delta nets over a pack of trees, in which states branch with the tree.

transformers' layer carries one state along a row. Here, each token continues from its parent. The
pack is cut into chunks, each on one path. All chunks are computed in parallel, except for their
states, which are computed level by level. A chunk of level n starts with the final state of a chunk
of level n-1. The first chunk of a tree has no initial state. Flat packs are trees without branches.
On a GPU, they use the kernels of flash-linear-attention, if it is installed
(`sightline-rl[linear-attention]`) and passes a trial. Everything else is plain torch.

The computation is the paper's chunked form (Gated Delta Networks, arXiv 2412.06464), in float32
like transformers. Dimensions: T tokens, C chunks, L tokens per chunk, H heads, K key and V value
width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN

from sightline.families.device_copy import copy_to_device

MAX_CHUNK = 64
"""The maximum number of tokens in a chunk, as in transformers."""
EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in transformers."""
TOLERANCE = 2e-2
"""The allowed error of a kernel, relative to the norm of the float32 result in plain torch."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes that the kernels support."""
SubtreeEnd = Int[np.ndarray, " tokens"]


@dataclass(frozen=True, eq=False)
class RecurrencePlan:
    """The recurrence of a pack: the tokens that each token continues from. Shared by all layers."""

    ancestors: Int[Tensor, "window_less_1 tokens"]
    """The indices of each token's parent, grandparent and so on. T if there is none."""
    chunks: Int[Tensor, "chunks length"]
    """The tokens of each chunk, level by level. Short chunks are padded with token 0."""
    is_real: Float[Tensor, "chunks length 1"]
    """1 for tokens, 0 for padding."""
    parents: list[Int[Tensor, " chunks_of_level"]]
    """For each level after the first, the parent chunks in the previous level."""
    level_sizes: list[int]
    places: Int[Tensor, " tokens"]
    """The index of each token in the flattened chunks."""
    bounds: Int[Tensor, " sequences_and_1"] | None
    """The start of each sequence in a flat pack, and the pack's end. None if paths branch."""


def find_parents(subtree_end: SubtreeEnd) -> Int[np.ndarray, " tokens"]:
    """Return the index of each token's predecessor on its path, or -1."""
    parents = np.arange(-1, len(subtree_end) - 1)
    for leaf in np.flatnonzero(subtree_end[:-1] <= np.arange(1, len(subtree_end))).tolist():
        above = np.flatnonzero(subtree_end[:leaf] > leaf + 1)
        parents[leaf + 1] = above[-1] if len(above) else -1
    return parents


def build_recurrence_plan(
    subtree_end: SubtreeEnd, window: int, device: torch.device
) -> RecurrencePlan:
    """Build a pack's plan for layers whose convolution covers `window` tokens."""
    parents, total = find_parents(subtree_end), len(subtree_end)
    # A run of consecutive tokens starts after each fork and at each new branch.
    parts = np.flatnonzero(parents != np.arange(-1, total - 1))
    starts = np.unique([0, *parts, *(parents[parts] + 1)])
    ends = np.append(starts[1:], total)
    size = min(MAX_CHUNK, int((ends - starts).max()))
    begins, stops, above = [], [], []
    levels: list[int] = []
    ending: dict[int, int] = {}
    """Maps the last token of each chunk to the chunk."""
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for begin in range(start, end, size):
            parent = ending.get(int(parents[begin]), -1)
            levels.append(0 if parent < 0 else levels[parent] + 1)
            above.append(parent)
            begins.append(begin)
            stops.append(min(begin + size, end))
            ending[stops[-1] - 1] = len(begins) - 1
    is_flat = bool((parents[parts] < 0).all())
    order = np.argsort(levels, kind="stable")
    rank = np.argsort(order)
    sizes = np.bincount(levels)
    firsts = np.cumsum(sizes) - sizes
    going_on = np.split(rank[np.array(above)[order]], firsts[1:])
    tokens = np.array(begins)[order, None] + np.arange(size)
    is_real = tokens < np.array(stops)[order, None]
    places = np.empty(total, dtype=np.int64)
    places[tokens[is_real]] = np.flatnonzero(is_real)
    steps = [np.where(parents < 0, total, parents)]
    while len(steps) < window - 1:
        steps.append(np.append(steps[0], total)[steps[-1]])
    copy = partial(copy_to_device, device=device)
    return RecurrencePlan(
        ancestors=copy(np.stack(steps)),
        chunks=copy(np.where(is_real, tokens, 0)),
        is_real=copy(is_real[..., None].astype(np.float32)),
        parents=[copy(r - first) for r, first in zip(going_on[1:], firsts[:-1], strict=True)],
        level_sizes=sizes.tolist(),
        places=copy(places),
        bounds=copy(np.array([0, *parts, total])) if is_flat else None,
    )


def pack_delta_nets(text: nn.Module) -> int:
    """Make a text model's gated delta nets accept a `recurrence` plan.

    The model is modified in place, and parameters keep their names. Return the number of tokens
    that the convolutions cover, or 0 if there are no such layers.
    """
    window = 0
    nets: list[Any] = [m for m in text.modules() if hasattr(m, "in_proj_qkv")]
    for module in nets:
        window = module.conv1d.kernel_size[0]
        module.forward = partial(_forward, module, module.forward)
    return window


@torch.compiler.disable  # each number of levels would need a separate graph
def _forward(
    module: Any,
    forward: Callable[..., Tensor],
    hidden_states: Float[Tensor, "rows length hidden"],
    recurrence: RecurrencePlan | None = None,
    **options: Any,
) -> Float[Tensor, "rows length hidden"]:
    """Run the layer over a pack. Without a `recurrence`, run transformers' own layer."""
    if recurrence is None:
        return forward(hidden_states, **options)
    hidden = hidden_states[0]
    mixed = _convolve(module, module.in_proj_qkv(hidden), recurrence)
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (-1, module.head_k_dim)) for x in (q, k))
    if (shared := module.num_v_heads // module.num_k_heads) > 1:
        q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
    v = v.unflatten(-1, (-1, module.head_v_dim))
    rate = nn.functional.softplus(module.in_proj_a(hidden).float() + module.dt_bias)
    decay = -module.A_log.float().exp() * rate
    beta = module.in_proj_b(hidden).sigmoid()
    out = apply_delta_rule(q, k, v, decay, beta, recurrence)
    gate = module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim))
    normed = module.norm(out.flatten(0, 1), gate.flatten(0, 1))
    result: Tensor = module.out_proj(normed.view(len(hidden), -1))
    return result[None]


def _convolve(
    module: Any, x: Float[Tensor, "tokens channels"], plan: RecurrencePlan
) -> Float[Tensor, "tokens channels"]:
    """Convolve each token with its predecessors on its path."""
    weight = module.conv1d.weight.float().squeeze(1)
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    out = x * weight[:, -1]
    for step, places in enumerate(plan.ancestors, start=2):
        out = out + padded.index_select(0, places) * weight[:, -step]
    if module.conv1d.bias is not None:
        out = out + module.conv1d.bias
    return ACT2FN[module.activation](out.to(x.dtype))


def apply_delta_rule(
    q: Float[Tensor, "tokens heads keys"],
    k: Float[Tensor, "tokens heads keys"],
    v: Float[Tensor, "tokens heads values"],
    decay: Float[Tensor, "tokens heads"],
    beta: Float[Tensor, "tokens heads"],
    plan: RecurrencePlan,
) -> Float[Tensor, "tokens heads values"]:
    """Return the output of each token after its state is decayed and updated.

    S' = exp(decay) S, and S = S' + k (beta (v - S' k)), with normalized keys and queries. `decay`
    is in log space. Padding has beta and decay 0, and changes no state.
    """
    if plan.bounds is not None and v.is_cuda and v.dtype in HALF_DTYPES:
        kernel = _find_kernel(q.shape[-1], v.shape[-1], v.device, v.dtype)
        if kernel is not None:
            return _run_kernel(kernel, (q, k, v), decay, beta, plan.bounds)

    def split(x: Tensor) -> Tensor:
        """(T, H, ...) to (C, H, L, ...)."""
        chunks = x.index_select(0, plan.chunks.flatten()).unflatten(0, plan.chunks.shape)
        return chunks.transpose(1, 2)

    dtype = v.dtype
    q, k = q.float(), k.float()
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q, k, v = split(q * q.shape[-1] ** -0.5), split(k), split(v.float())
    real = plan.is_real.transpose(1, 2)
    rate = (split(beta.float()) * real).unsqueeze(-1)
    fades = split(decay) * real
    kept = fades.cumsum(-1).exp().unsqueeze(-1)
    between = _sum_between(fades).exp()
    left = between[..., -1, :].unsqueeze(-1)
    total_decay = kept[..., -1:, :]
    # The value of each token, minus the prediction from its state and earlier tokens.
    system = (k * rate) @ k.transpose(-1, -2) * between
    right_side = torch.cat([v * rate, k * rate * kept], dim=-1)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    written, predicted = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.transpose(-1, -2) * between
    parts = (q * kept, k * left, total_decay, written, predicted, within)
    levels = zip(*(x.split(plan.level_sizes) for x in parts), strict=True)
    state, outs = None, []
    above = [None, *plan.parents]
    for parents, (read, keys, remains, writes, predicts, sees) in zip(above, levels, strict=True):
        if state is None:
            new, out = writes, sees @ writes
            state = keys.transpose(-1, -2) @ new
        else:
            state = state.index_select(0, parents)
            new = writes - predicts @ state
            out = read @ state + sees @ new
            state = state * remains + keys.transpose(-1, -2) @ new
        outs.append(out)
    flat = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, plan.places).to(dtype)


def _run_kernel(
    kernel: Any, heads: Iterable[Tensor], decay: Tensor, beta: Tensor, bounds: Tensor | None
) -> Tensor:
    rates = {"g": decay[None], "beta": beta[None].float(), "cu_seqlens": bounds}
    out: Tensor = kernel(*(x[None] for x in heads), **rates, use_qk_l2norm_in_kernel=True)[0]
    return out[0]


@contextmanager
def take_trial_gradients() -> Iterator[None]:
    """Enable gradients inside the context, so that a kernel can be tested during a run.

    An engine runs without gradients, and checkpointed blocks count the tensors that are saved.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        yield


@cache
def _find_kernel(keys: int, values: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Return flash-linear-attention's chunked rule, or None.

    It is used only if its outputs and gradients match plain torch, which fails for some
    combinations of GPU and Triton.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    except ImportError:
        return None
    try:
        with take_trial_gradients():
            problem = _try_kernel(kernel, keys, values, device, dtype)
    except Exception as error:  # a different version may raise anything
        problem = f"{type(error).__name__}: {error}"
    if problem:
        message = "linear attention uses plain torch instead of flash-linear-attention"
        print(f"{message}: {problem}", file=sys.stderr)
    return None if problem else kernel


def _try_kernel(
    kernel: Any, keys: int, values: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Describe the first difference between the kernel and plain torch, or return ""."""
    lengths = (MAX_CHUNK + 3, 5)
    ends = np.repeat(np.cumsum(lengths), lengths)
    plan = build_recurrence_plan(ends, 1, device)
    shapes = [(len(ends), 2, *width) for width in ((keys,), (keys,), (values,), (), ())]
    drawn = torch.Generator(device).manual_seed(0)  # does not affect the run's random state
    inputs = [torch.randn(shape, generator=drawn, device=device) for shape in shapes]
    inputs[:3] = [x.to(dtype) for x in inputs[:3]]
    wide = [x.float().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    outputs = _run_kernel(kernel, inputs[:3], -inputs[3].exp(), inputs[4].sigmoid(), plan.bounds)
    gradients = torch.autograd.grad(outputs.float().square().sum(), inputs)
    q, k, v, decay, beta = wide
    plain = apply_delta_rule(q, k, v, -decay.exp(), beta.sigmoid(), plan)
    expected = torch.autograd.grad(plain.square().sum(), wide)
    names = ("outputs", *(f"gradients of {x}" for x in ("q", "k", "v", "decay", "beta")))
    for name, x, y in zip(names, (outputs, *gradients), (plain, *expected), strict=True):
        error_norm = float((x.float() - y).detach().norm() / y.detach().norm())
        if not error_norm <= TOLERANCE:
            return f"its {name} differ from plain torch's by {error_norm:.1%}"
    return ""


def _sum_between(decay: Float[Tensor, "chunks heads length"]) -> Tensor:
    """Return the total decay from token j (exclusive) to token i at [i, j]. -inf if j > i.

    Each j is summed separately, because the difference of two long sums would lose precision.
    """
    length = decay.shape[-1]
    mask = torch.ones(length, length, dtype=torch.bool, device=decay.device)
    later = decay.unsqueeze(-1).expand(*decay.shape, length).masked_fill(mask.triu(), 0.0)
    return later.cumsum(-2).masked_fill(mask.triu(1), -torch.inf)
