"""One attention function for every model; what may see what is a pattern that is passed in.

transformers calls `_attention_forward` for each layer. The text layers get a `pattern` (a flat
pack, a tree, or the rows of an engine); a vision tower passes the boundaries of its images.

Letters: B rows, T tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from sightline.compute import attention_cuda
from sightline.errors import FamilyError

# transformers hands the boundaries of images to attention functions with "flash" in their name.
ATTENTION_NAME = "sightline_flash"
COMPILABLE_PATTERNS = (attention_cuda.FlexTreePattern, attention_cuda.VarlenPattern)
"""What a compiler takes into the graph of its block: what differs from pack to pack is data."""


class AttentionPattern(Protocol):
    state: Any
    """State of recurrent layers so far, in a cache of transformers that they update; None where
    they begin here and nobody needs their state afterwards."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """(B, N, T, D) of q (B, N, T, D) and k, v (B, N or fewer, T, D)."""
        ...


def register_attention(opaque: bool = False) -> str:
    """Makes the function known to transformers, and returns its name.

    No function for masks goes with it: transformers then makes none, and does not search the
    positions for packed sequences, which it would have to ask the device for.

    A compiler leaves an `opaque` one as it is, unless its pattern is of `COMPILABLE_PATTERNS`:
    others differ from pack to pack in more than data, and each would be compiled anew.
    """
    AttentionInterface.register(
        ATTENTION_NAME, _build_compilable() if opaque else _attention_forward
    )
    return ATTENTION_NAME


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's attention. Values narrower than keys are widened for it: the fused kernels take
    none, and what torch does instead is several times slower."""
    width = v.shape[-1]
    if width < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    pattern: AttentionPattern | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if pattern is not None:
        out = pattern.attend(int(module.layer_idx), query, key, value, scaling)
    elif cu_seq_lens_q is not None:
        out = _attend_images(query, key, value, scaling, cu_seq_lens_q, max_length_q)
    else:
        raise FamilyError(
            f"{type(module).__name__} attends without a pattern",
            "pass attention= to Forward.hidden",
        )
    return out.transpose(1, 2), None


def find_graph_options(hidden: torch.Tensor, options: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a block that is one graph, its attention included; None where the graph is
    broken there."""
    if isinstance(options.get("pattern"), COMPILABLE_PATTERNS):
        return options
    ends, longest = options.get("cu_seqlens"), options.get("max_seqlen")
    if ends is None or longest is None or not attention_cuda.is_supported(hidden):
        return None
    return {**options, "pattern": attention_cuda.get_image_pattern(len(hidden), ends, longest)}


def _build_compilable() -> Callable[..., tuple[torch.Tensor, None]]:
    outside: Callable[..., tuple[torch.Tensor, None]] = torch.compiler.disable(_attention_forward)

    def attend_compiled(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        pattern: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if isinstance(pattern, COMPILABLE_PATTERNS):
            # Not the number of the layer, for which each would be compiled by itself.
            out = pattern.attend(0, query, key, value, scaling)
        elif isinstance(pattern, attention_cuda.ImagePattern):
            ends, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
            out = pattern.attend(query, key, value, scaling, ends, longest)
        else:
            return outside(
                module, query, key, value, attention_mask, scaling, pattern=pattern, **kwargs
            )
        return out.transpose(1, 2), None

    return attend_compiled


def _attend_images(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    ends: torch.Tensor,
    longest: Any,
) -> torch.Tensor:
    """Full attention inside each image; images of one length go through together."""
    if attention_cuda.is_supported(q):
        images = attention_cuda.get_image_pattern(q.shape[2], ends, longest)
        return images.attend(q, k, v, scaling, ends, longest)
    bounds = ends.tolist()
    lengths = np.diff(bounds)
    if len(set(lengths.tolist())) == 1:
        return _attend_blocks(q, k, v, scaling, int(lengths[0]))
    out = torch.empty_like(q)
    for length in np.unique(lengths):
        starts = torch.tensor([bounds[i] for i in np.flatnonzero(lengths == length)])
        index = (starts[:, None] + torch.arange(int(length))).reshape(-1).to(q.device)
        part = _attend_blocks(q[:, :, index], k[:, :, index], v[:, :, index], scaling, int(length))
        out = out.index_copy(2, index, part)
    return out


def _attend_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, length: int
) -> torch.Tensor:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0).unflatten(1, (-1, length)).transpose(0, 1)

    out = F.scaled_dot_product_attention(rows(q), rows(k), rows(v), scale=scaling)
    return out.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _PaddedRows:
    """Rows of a run of tokens as a rectangle; past its end a row repeats its first token."""

    def __init__(
        self, starts: np.ndarray, ends: np.ndarray, num_tokens: int, device: torch.device
    ) -> None:
        column = np.arange(int((ends - starts).max()))
        tokens = starts[:, None] + column
        self.inside = tokens < ends[:, None]
        self.tokens = np.where(self.inside, tokens, starts[:, None])
        # Rows of one length that are the run need no copy to be a rectangle.
        in_order = self.inside.all() and np.array_equal(tokens.reshape(-1), np.arange(num_tokens))
        self._length = len(column) if in_order else 0
        self._rows = torch.from_numpy(self.tokens).to(device)
        self._back = torch.from_numpy(np.flatnonzero(self.inside.reshape(-1))).to(device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, **options: Any
    ) -> torch.Tensor:
        """(1, N, tokens of the rows, D), row after row."""
        gqa = q.shape[1] != k.shape[1]
        rows = (self._split(x) for x in (q, k, v))
        out = attend(*rows, scale=scaling, enable_gqa=gqa, **options)
        flat = out.transpose(0, 1).flatten(1, 2)
        return (flat if self._length else flat[:, self._back]).unsqueeze(0)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        if self._length:
            return x.squeeze(0).unflatten(1, (-1, self._length)).transpose(0, 1)
        return x.squeeze(0)[:, self._rows].transpose(0, 1)


class PackedPattern:
    """Sequences side by side in one row, each causal in itself and blind to the others."""

    state = None

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        ends = np.cumsum(lengths)
        # Causal attention lets no real token see the padding, and its outputs are not read back.
        self._rows = _PaddedRows(ends - lengths, ends, int(ends[-1]), device)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return self._rows.attend(q, k, v, scaling, is_causal=True)


class TreePattern:
    """Nodes each once: q sees k when k <= q < subtree_end[k]. A plain mask for each tree.

    Trees of about one size go through together, padded to the largest of them.
    """

    state = None

    def __init__(self, subtree_end: np.ndarray, device: torch.device) -> None:
        self._parts = [
            _TreeGroup(subtree_end, trees, device)
            for trees in _group_by_size(find_trees(subtree_end))
        ]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for part in self._parts:
            out = out.index_copy(2, part.tokens, part.attend(q, k, v, scaling))
        return out


def find_trees(subtree_end: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of every tree: its first token is seen to the end."""
    found, start = [], 0
    while start < len(subtree_end):
        end = int(subtree_end[start])
        found.append((start, end))
        start = end
    return found


def _group_by_size(trees: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Trees in groups by size, none under three quarters of the largest of its group."""
    parts: list[list[tuple[int, int]]] = []
    for tree in sorted(trees, key=lambda tree: (tree[0] - tree[1], tree[0])):
        largest = parts[-1][0][1] - parts[-1][0][0] if parts else 0
        if tree[1] - tree[0] < 0.75 * largest or not parts:
            parts.append([])
        parts[-1].append(tree)
    return parts


class _TreeGroup:
    def __init__(
        self, subtree_end: np.ndarray, trees: list[tuple[int, int]], device: torch.device
    ) -> None:
        starts, ends = (np.array(bounds) for bounds in zip(*trees, strict=True))
        self._rows = rows = _PaddedRows(starts, ends, len(subtree_end), device)
        column = np.arange(rows.tokens.shape[1])
        # Nobody may see the padding behind a tree.
        last = np.where(rows.inside, subtree_end[rows.tokens] - starts[:, None], 0)
        # A row that sees nothing has no softmax: padding sees the first token.
        last[:, 0] = len(column)
        sees = (column <= column[:, None]) & (column[:, None] < last[:, None, :])
        self._mask = torch.from_numpy(sees[:, None]).to(device)
        self.tokens = torch.from_numpy(rows.tokens[rows.inside]).to(device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return self._rows.attend(q, k, v, scaling, attn_mask=self._mask)


def build_attention_pattern(
    subtree_end: np.ndarray, device: torch.device, dtype: torch.dtype = torch.float32
) -> AttentionPattern:
    """The cheapest pattern that says the same as `subtree_end`, for arithmetic in `dtype`."""
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
