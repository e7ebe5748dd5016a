"""Batch-invariant attention for `[model] exact = true`.

Query tiles of a fixed size attend to pages of keys, whether a sequence is trained whole, prefilled
in chunks or decoded. The summation order of a query therefore depends only on its own keys. On CUDA
the tiles use the decoding kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.compute.attention import AttentionPattern, build_attention_pattern
from sightline.compute.attention_shapes import Attended, Keys, Queries, TokenQueries, Values
from sightline.compute.plain_gradient import call_exact
from sightline.families.device_copy import copy_to_device

PAGE = 64
TILE_ROWS = {"cpu": 16, "cuda": 64}
"""Number of queries in a tile, times the number of heads that share their keys."""
QUERIES_AT_ONCE = 4096
"""Queries per pass. Buffers are freed before the next pass."""

KeyPages = Float[Tensor, "pages page kv_heads width"]
ValuePages = Float[Tensor, "pages page kv_heads value_width"]


class PagedKeys(NamedTuple):
    """The keys and values that each row, or each tile, attends to."""

    keys: KeyPages
    values: ValuePages
    block_tables: Int[Tensor, "rows row_pages"]
    seq_lens: Int[Tensor, " rows"]


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN, whose use depends on the number of rows and products."""
    backend: Any = torch.backends.mkldnn  # torch's stubs declare `enabled` constant
    before, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = before


def count_queries(heads: int, kv_heads: int, device: torch.device) -> int:
    return max(1, TILE_ROWS[device.type] // (heads // kv_heads))


@dataclass(frozen=True, slots=True)
class Tiles:
    """A run's queries in tiles. Each tile belongs to one sequence, whose last tile is padded."""

    queries: Int[Tensor, "tiles queries"]
    """Positions in the run."""
    places: Int[Tensor, " tokens"]
    """Index of each token of the run among the queries of all tiles."""
    block_tables: Int[Tensor, "tiles row_pages"]
    first_seen: Int[Tensor, " tiles"]
    """Number of keys that the first query sees. Each next one sees one more, up to `seq_lens`."""
    seq_lens: Int[Tensor, " tiles"]


def build_tiles(
    block_tables: Int[np.ndarray, "rows row_pages"],
    starts: Int[np.ndarray, " rows"],
    counts: Int[np.ndarray, " rows"],
    num_queries: int,
    device: torch.device,
) -> Tiles:
    """Return the tiles of a run: row i computes `counts[i]` tokens after its first `starts[i]`."""
    offsets, num_tiles = np.cumsum(counts) - counts, -(-counts // num_queries)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    inside = (nth * num_queries)[:, None] + np.arange(num_queries)
    last = (counts[row] - 1)[:, None]
    queries = offsets[row][:, None] + np.minimum(inside, last)
    places = np.empty(counts.sum(), dtype=np.int64)
    places[queries[inside <= last]] = np.flatnonzero(inside <= last)
    first_seen = starts[row] + nth * num_queries + 1
    seq_lens = np.minimum(first_seen + num_queries - 1, (starts + counts)[row])
    narrow = (x.astype(np.int32) for x in (block_tables[row], first_seen, seq_lens))
    return Tiles(*(copy_to_device(x, device) for x in (queries, places, *narrow)))


def attend_run(
    q: TokenQueries, keys: KeyPages, values: ValuePages, tiles: Tiles, scaling: float
) -> Float[Tensor, "tokens heads value_width"]:
    outputs, at_once = [], max(1, QUERIES_AT_ONCE // tiles.queries.shape[1])
    for at in range(0, len(tiles.queries), at_once):
        part = slice(at, at + at_once)
        seen = PagedKeys(keys, values, tiles.block_tables[part], tiles.seq_lens[part])
        outputs.append(attend_tiles(q[tiles.queries[part]], seen, tiles.first_seen[part], scaling))
    return torch.cat(outputs).flatten(0, 1)[tiles.places]


def attend_tiles(
    q: Float[Tensor, "tiles queries heads width"],
    seen: PagedKeys,
    first_seen: Int[Tensor, " tiles"],
    scaling: float,
) -> Float[Tensor, "tiles queries heads value_width"]:
    """Return the attention output of each tile's queries.

    On a CPU every product covers one tile and one page. Pages that a query does not see add zeros.
    """
    if q.is_cuda:
        from sightline.compute.triton_kernels import attend_paged

        return attend_paged(q, *seen, scaling, first_seen)
    with without_onednn():
        return _attend_on_cpu(q, seen, first_seen, scaling)


def _attend_on_cpu(q: Tensor, seen: PagedKeys, first_seen: Tensor, scaling: float) -> Tensor:
    keys, values, block_tables, seq_lens = seen
    (num_tiles, num_queries, heads, _), kv_heads = q.shape, keys.shape[2]
    pages = block_tables[:, : -(-int(seq_lens.max().clamp(min=1)) // PAGE)].long()
    index = torch.arange(pages.shape[1] * PAGE)
    is_written = (index < seq_lens[:, None]).view(num_tiles, -1, PAGE, 1, 1)
    k = keys[pages].permute(0, 3, 1, 4, 2).contiguous()
    # Unwritten memory may hold NaN, and 0 times NaN is NaN.
    v = values[pages].masked_fill(~is_written, 0).permute(0, 3, 1, 2, 4).contiguous()
    queries = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
    queries = queries.unsqueeze(2).expand(-1, -1, pages.shape[1], -1, -1).contiguous()
    scores = (queries @ k).transpose(2, 3).flatten(3) * scaling
    limit = torch.minimum(first_seen[:, None] + torch.arange(num_queries), seq_lens[:, None])
    limit = limit.clamp(min=1).repeat_interleave(heads // kv_heads, dim=1)
    scores = scores.masked_fill(index >= limit[:, None, :, None], float("-inf"))
    weights = scores.softmax(-1).unflatten(3, (-1, PAGE)).transpose(2, 3).contiguous()
    parts = weights @ v
    out = torch.zeros_like(parts[:, :, 0])
    for page in range(pages.shape[1]):
        out = out + parts[:, :, page]
    return out.unflatten(2, (num_queries, -1)).transpose(1, 2).flatten(2, 3)


class ExactPattern:
    """`AttentionPattern` of packed sequences. Each is computed as in an engine."""

    state = None

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self._lengths, self._device, self._dtype = np.array(lengths), device, dtype
        ends = np.cumsum(lengths)
        pages = -(-self._lengths // PAGE)
        self._num_pages = num_pages = int(pages.sum())
        first = np.cumsum(pages) - pages
        # After its own pages, a sequence lists pages of others, which it does not see.
        self._block_tables = np.minimum(first[:, None] + np.arange(pages.max()), num_pages - 1)
        inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        self._places = copy_to_device(np.repeat(first * PAGE, lengths) + inside, device)
        self._tiles: dict[int, Tiles] = {}

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        exact = partial(self._attend, scaling=scaling)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.plain.attend(layer, q, k, v, scaling)

        return call_exact(exact, plain, q, k, v)

    @cached_property
    def plain(self) -> AttentionPattern:
        """A differentiable pattern with the same result up to rounding."""
        ends = np.repeat(np.cumsum(self._lengths), self._lengths)
        return build_attention_pattern(ends, self._device, self._dtype)

    def _attend(self, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        queries = count_queries(q.shape[1], k.shape[1], self._device)
        if queries not in self._tiles:
            self._tiles[queries] = build_tiles(
                self._block_tables, 0 * self._lengths, self._lengths, queries, self._device
            )
        run_q, run_k, run_v = (x[0].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.new_empty(self._num_pages, PAGE, *x.shape[1:]) for x in (run_k, run_v))
        keys.flatten(0, 1).index_copy_(0, self._places, run_k)
        values.flatten(0, 1).index_copy_(0, self._places, run_v)
        attended = attend_run(run_q, keys, values, self._tiles[queries], scaling)
        return attended.transpose(0, 1).unsqueeze(0)
