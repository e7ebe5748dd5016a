"""One attention function for every model. A pattern decides which tokens attend to which.

transformers calls `_attention_forward` for each layer. Text layers get a `pattern` (a flat pack, a
tree, or the rows of an engine). A vision tower passes the boundaries of its images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface

from sightline.compute import attention_cuda
from sightline.compute.attention_cudnn import group_by_length, pad_rows
from sightline.compute.attention_shapes import Attended, Bounds, Keys, Queries, Values
from sightline.compute.plain_gradient import call_exact
from sightline.errors import FamilyError

SubtreeEnd = Int[np.ndarray, " tokens"]
Rows = Int[np.ndarray, " rows"]
# transformers passes image boundaries only to attention functions with "flash" in their name.
ATTENTION_NAME = "sightline_flash"
COMPILABLE_PATTERNS = (attention_cuda.FlexTreePattern, attention_cuda.VarlenPattern)
"""Patterns that a compiler can trace, because packs differ in data only."""


class AttentionPattern(Protocol):
    state: Any
    """Cache with the state of recurrent layers, which they update. None if they start here and the
    state is not needed later. Then the pattern's `subtree_end` says where sequences start."""

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended: ...


def register_attention(opaque: bool = False, exact: bool = False) -> str:
    """Register the attention function with transformers, and return its name.

    There is no mask function, so transformers builds no masks and does not search the positions for
    packed sequences, which would synchronize with the device.

    A compiler does not trace an `opaque` function unless its pattern is in `COMPILABLE_PATTERNS`.
    Other patterns would be compiled again for each pack. An `exact` function attends to images in a
    trainer as in an engine.
    """
    name = f"{ATTENTION_NAME}_exact" if exact else ATTENTION_NAME
    plain = partial(_attention_forward, exact=exact)
    AttentionInterface.register(name, _build_compilable() if opaque else plain)
    return name


def attend(
    q: Float[Tensor, "rows heads queries width"],
    k: Float[Tensor, "rows kv_heads keys width"],
    v: Float[Tensor, "rows kv_heads keys value_width"],
    **options: Any,
) -> Float[Tensor, "rows heads queries value_width"]:
    """Call torch's attention. Values may be narrower than keys."""
    wide = attention_cuda.pad_values(v, k)
    return F.scaled_dot_product_attention(q, k, wide, **options)[..., : v.shape[-1]]


def _attention_forward(
    module: Any,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Tensor | None,
    scaling: float,
    pattern: AttentionPattern | None = None,
    cu_seq_lens_q: Bounds | None = None,
    max_length_q: Any = None,
    exact: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if pattern is not None:
        out = pattern.attend(int(module.layer_idx), query, key, value, scaling)
    elif cu_seq_lens_q is not None:
        among_images = attend_images_exact if exact else attend_images
        out = among_images(query, key, value, scaling, cu_seq_lens_q, max_length_q)
    else:
        problem = f"{type(module).__name__} attends without a pattern"
        raise FamilyError(problem, "pass attention= to Forward.hidden")
    return out.transpose(1, 2), None


def find_graph_options(hidden: Tensor, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options for compiling a block, with its attention, as one graph; None if attention
    or a recurrent layer breaks the graph."""
    if options.get("recurrence") is not None:
        return None
    if isinstance(options.get("pattern"), COMPILABLE_PATTERNS):
        return options
    ends, longest = options.get("cu_seqlens"), options.get("max_seqlen")
    if ends is None or longest is None or not attention_cuda.is_supported(hidden):
        return None
    return {**options, "pattern": attention_cuda.get_image_pattern(len(hidden), ends, longest)}


def _build_compilable() -> Callable[..., tuple[Tensor, None]]:
    outside: Callable[..., tuple[Tensor, None]] = torch.compiler.disable(_attention_forward)

    def attend_compiled(
        module: Any, query: Queries, key: Keys, value: Values, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        pattern, scaling = options.get("pattern"), options["scaling"]
        if isinstance(pattern, COMPILABLE_PATTERNS):
            # A constant instead of the layer's number, for which each layer would be compiled.
            out = pattern.attend(0, query, key, value, scaling)
        elif isinstance(pattern, attention_cuda.ImagePattern):
            ends, longest = options["cu_seq_lens_q"], options["max_length_q"]
            out = pattern.attend(query, key, value, scaling, ends, longest)
        else:
            return outside(module, query, key, value, attention_mask, **options)
        return out.transpose(1, 2), None

    return attend_compiled


def attend_images(
    q: Queries, k: Keys, v: Values, scaling: float, ends: Bounds, longest: Any
) -> Attended:
    """Compute full attention within each image. Images of equal length are batched."""
    if attention_cuda.is_supported(q):
        images = attention_cuda.get_image_pattern(q.shape[2], ends, longest)
        return images.attend(q, k, v, scaling, ends, longest)
    bounds = ends.cpu().numpy()
    lengths = np.diff(bounds)
    groups = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
    rows = [_PaddedRows(bounds[g], bounds[g + 1], q.shape[2], q.device) for g in groups]
    return _attend_groups(rows, q, k, v, scaling)


def attend_images_exact(
    q: Queries, k: Keys, v: Values, scaling: float, ends: Bounds, longest: Any
) -> Attended:
    """Attend with the kernel for passes without gradients. Gradients may use a faster kernel."""

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_images(q, k, v, scaling, ends, longest)

    return call_exact(compute, compute, q, k, v)


class _PaddedRows:
    """Rows of a run, padded to a rectangle. `options` are passed to torch's attention."""

    def __init__(
        self, starts: Rows, ends: Rows, num_tokens: int, device: torch.device, **options: Any
    ) -> None:
        self._options = options
        tokens, is_real = pad_rows(starts, ends, int((ends - starts).max()))
        run = np.arange(num_tokens)
        self.is_run = np.array_equal(tokens[is_real], run)
        """Whether the rows contain all tokens of the run, in order."""
        # If the rows have equal length and cover the run, a view is a rectangle.
        self._length = tokens.shape[1] if np.array_equal(tokens.reshape(-1), run) else 0
        self.tokens = torch.from_numpy(tokens[is_real]).to(device)
        self._rows = torch.from_numpy(tokens).to(device)
        self._real = torch.from_numpy(np.flatnonzero(is_real)).to(device)

    def attend(self, q: Queries, k: Keys, v: Values, scaling: float) -> Tensor:
        """Return the attention output of the rows' tokens, row after row."""
        gqa = q.shape[1] != k.shape[1]
        rows = (self._split(x) for x in (q, k, v))
        out = attend(*rows, scale=scaling, enable_gqa=gqa, **self._options)
        flat = out.transpose(0, 1).flatten(1, 2)
        return (flat if self._length else flat[:, self._real]).unsqueeze(0)

    def _split(self, x: Tensor) -> Tensor:
        if self._length:
            return x.squeeze(0).unflatten(1, (-1, self._length)).transpose(0, 1)
        return x.squeeze(0)[:, self._rows].transpose(0, 1)


def _attend_groups(
    groups: Sequence[_PaddedRows], q: Queries, k: Keys, v: Values, scaling: float
) -> Attended:
    if len(groups) == 1 and groups[0].is_run:
        return groups[0].attend(q, k, v, scaling)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for rows in groups:
        out = out.index_copy(2, rows.tokens, rows.attend(q, k, v, scaling))
    return out


class PackedPattern:
    """Packed sequences in one row, with causal attention within each sequence."""

    state = None

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        ends = np.cumsum(lengths)
        self.subtree_end = np.repeat(ends, lengths)
        # With causal attention no real token sees the padding, whose outputs are discarded.
        self._rows = _PaddedRows(ends - lengths, ends, int(ends[-1]), device, is_causal=True)

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        return self._rows.attend(q, k, v, scaling)


class TreePattern:
    """Tree attention with a plain mask per tree: q sees k if k <= q < subtree_end[k]."""

    state = None

    def __init__(self, subtree_end: SubtreeEnd, device: torch.device) -> None:
        self.subtree_end = subtree_end
        starts, ends = (np.array(bounds) for bounds in zip(*find_trees(subtree_end), strict=True))
        self._groups = []
        for group in group_by_length((ends - starts).tolist()):
            rows = starts[group], ends[group]
            mask = torch.from_numpy(_build_tree_masks(subtree_end, *rows)).to(device)
            self._groups.append(_PaddedRows(*rows, len(subtree_end), device, attn_mask=mask))

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        return _attend_groups(self._groups, q, k, v, scaling)


def find_trees(subtree_end: SubtreeEnd) -> list[tuple[int, int]]:
    """Return the start and end of every tree. Its first token's subtree is the whole tree."""
    trees, start = [], 0
    while start < len(subtree_end):
        end = int(subtree_end[start])
        trees.append((start, end))
        start = end
    return trees


def _build_tree_masks(
    subtree_end: SubtreeEnd, starts: Rows, ends: Rows
) -> Bool[np.ndarray, "rows 1 queries keys"]:
    tokens, is_real = pad_rows(starts, ends, int((ends - starts).max()))
    column = np.arange(tokens.shape[1])
    # No token may see the padding after a tree.
    last = np.where(is_real, subtree_end[tokens] - starts[:, None], 0)
    # Padding sees the first token, because a softmax over no keys is undefined.
    last[:, 0] = len(column)
    sees = (column <= column[:, None]) & (column[:, None] < last[:, None, :])
    return sees[:, None]


def build_attention_pattern(
    subtree_end: SubtreeEnd, device: torch.device, dtype: torch.dtype = torch.float32
) -> AttentionPattern:
    """Return the cheapest pattern that is equivalent to `subtree_end`, for `dtype`."""
    ends = np.unique(subtree_end)
    starts = np.concatenate([[0], ends[:-1]])
    flat = np.repeat(ends, ends - starts)
    if ends[-1] == len(subtree_end) and np.array_equal(flat, subtree_end):
        lengths = (ends - starts).tolist()
        if device.type == "cuda" and dtype in attention_cuda.HALF_DTYPES:
            return attention_cuda.VarlenPattern(lengths, device)
        return PackedPattern(lengths, device)
    if device.type == "cuda":
        return attention_cuda.FlexTreePattern(subtree_end, device)
    return TreePattern(subtree_end, device)
