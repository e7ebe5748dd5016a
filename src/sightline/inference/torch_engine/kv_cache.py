"""The paged KV cache. A page holds a fixed number of tokens, so memory use grows with the content.
A row has a list of pages, and rows with the same prefix share pages.

On a GPU, rows with one new token attend with a kernel that reads the pages in place. Chunks of
prompts gather the keys of their rows, and attend as packed sequences do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.compute.attention import attend
from sightline.compute.attention_cuda import attend_varlen, is_supported, pad_values
from sightline.compute.attention_exact import (
    PAGE,
    KeyPages,
    PagedKeys,
    Tiles,
    ValuePages,
    attend_run,
    attend_tiles,
    build_tiles,
    count_queries,
)
from sightline.compute.attention_shapes import Attended, Bounds, Keys, Queries, Values
from sightline.families.device_copy import copy_to_device
from sightline.families.experts import Routes
from sightline.inference.torch_engine.row_table import StepPlan

BlockTables = Int[Tensor, "rows row_pages"]
SeqLens = Int[Tensor, " rows"]

BLOCK_SIZE = PAGE
INITIAL_PAGES = 256
# The cache grows by doubling, but by at most this many pages at a time.
MAX_NEW_PAGES = 1024


class KVCache:
    """A KV cache that grows with its content. Only the engine's thread uses it."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        max_new_pages: int = MAX_NEW_PAGES,
        exact: bool = False,
        max_bytes: int = 0,
    ) -> None:
        self._max_new_pages = max_new_pages
        self.max_bytes = max_bytes
        """Maximum size; 0 for the size of all rows at their full length."""
        self.exact = exact
        """Whether attention matches the trainer's bit for bit."""
        self._device = device
        self._dtype = dtype
        self._is_cpu = device.type == "cpu"
        max_blocks = -(-max_model_len // BLOCK_SIZE)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        """The pages of each row, in the order of its tokens. Its last page fills the rest."""
        self._num_pages = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_users = np.zeros(0, dtype=np.int32)
        """Number of rows that use each page; 0 if it is free."""
        self._free: list[int] = []
        self.generation = 0
        """Increases whenever pages move in memory."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._routes: dict[int, Tensor] = {}
        """The experts of each token, in one table for all layers, under the key 0."""

    @property
    def token_bytes(self) -> int:
        """Memory of one token in all layers; 0 before the first pass, which defines the shapes."""
        return sum(table.stride(1) * table.element_size() for table in self._tables())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables())

    def _tables(self) -> list[Tensor]:
        return [*self._keys.values(), *self._values.values(), *self._routes.values()]

    @property
    def max_pages(self) -> int:
        if not self.max_bytes or not self.token_bytes:
            return self.block_tables.size
        return min(self.block_tables.size, self.max_bytes // (self.token_bytes * BLOCK_SIZE))

    def has_room(self, lengths: Sequence[int], rows: Sequence[int]) -> bool:
        """Return whether sequences of these lengths fit in addition to the content of `rows`.

        Before the first pass, which defines the size of a token, one sequence fits.
        """
        if self.max_bytes and not self.token_bytes:
            return len(lengths) == 1
        num_pages = sum(-(-length // BLOCK_SIZE) for length in lengths)
        return num_pages + int(self._num_pages[list(rows)].sum()) <= self.max_pages

    def reserve(self, plan: StepPlan) -> None:
        """Allocate pages for the tokens that the plan computes."""
        for row in plan.rows[plan.starts == 0].tolist():
            self.free_row(row)  # its pages may be shared, and must not be overwritten
        missing = -(-plan.ends // BLOCK_SIZE) - self._num_pages[plan.rows]
        if (missing > 0).any():
            for row, count in zip(plan.rows.tolist(), missing.tolist(), strict=True):
                if count > 0:
                    self._add_pages(row, count)

    def _add_pages(self, row: int, count: int) -> None:
        if count > len(self._free):
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        have = int(self._num_pages[row])
        self.block_tables[row, have : have + count] = pages
        self.block_tables[row, have + count :] = pages[-1]
        self._num_users[pages] = 1
        self._num_pages[row] += count
        if self._is_cpu:  # CPU attention also reads masked keys, which must be finite
            for table in self._tables():
                table[pages] = 0

    def _grow(self, missing: int) -> None:
        have = len(self._num_users)
        more = max(missing, min(max(have, INITIAL_PAGES), self._max_new_pages))
        more = max(missing, min(more, self.max_pages - have))
        self.generation += 1  # first, because some layers have moved if memory runs out halfway
        for tables in (self._keys, self._values, self._routes):
            for layer, old in tables.items():
                tables[layer] = new = old.new_empty(have + more, *old.shape[1:])
                new[:have] = old[:have]
                del old
        self._num_users = np.concatenate([self._num_users, np.zeros(more, dtype=np.int32)])
        self._free = [*range(have + more - 1, have - 1, -1), *self._free]

    def free_row(self, row: int) -> None:
        """Release the row's pages. Pages that no other row uses become free."""
        pages = self.block_tables[row, : self._num_pages[row]]
        self._num_users[pages] -= 1
        self._free.extend(pages[self._num_users[pages] == 0].tolist())
        self._num_pages[row] = 0

    def share_prefix(self, source: int, row: int, length: int) -> None:
        """Let `row` begin with the first `length` tokens of `source`.

        Full pages are shared. A partial page is copied, because both rows will write to it.
        """
        self.free_row(row)
        full, rest = divmod(length, BLOCK_SIZE)
        pages = self.block_tables[source, :full]
        self.block_tables[row, :full] = pages
        self.block_tables[row, full:] = pages[-1] if full else 0
        self._num_users[pages] += 1
        self._num_pages[row] = full
        if rest:
            self._add_pages(row, 1)
            old, new = int(self.block_tables[source, full]), int(self.block_tables[row, full])
            for table in self._tables():
                table[new, :rest] = table[old, :rest]

    def pages(
        self,
        layer: int,
        k: Float[Tensor, "tokens kv_heads width"],
        v: Float[Tensor, "tokens kv_heads value_width"],
    ) -> tuple[KeyPages, ValuePages]:
        """Return the pages of a layer, and create them on first use."""
        if layer not in self._values:  # created last, so they are missing if memory ran out
            for tables, run in ((self._keys, k), (self._values, v)):
                shape = (len(self._num_users), BLOCK_SIZE, *run.shape[1:])
                allocate = torch.zeros if self._is_cpu else torch.empty
                tables[layer] = allocate(shape, device=self._device, dtype=self._dtype)
        return self._keys[layer], self._values[layer]

    def put_routes(self, plan: StepPlan, routes: Routes) -> None:
        """Store the experts of the plan's tokens. Rows that share a prefix share them."""
        if not self._routes:
            shape = (len(self._num_users), BLOCK_SIZE, *routes.shape[1:])
            self._routes[0] = torch.zeros(shape, device=self._device, dtype=routes.dtype)
        places = copy_to_device(self.find_places(*plan.flat()), self._device)
        self._routes[0].flatten(0, 1).index_copy_(0, places, routes)

    def get_routes(self, row: int, start: int, stop: int) -> np.ndarray:
        """Return the experts of a row's tokens. This waits for the device."""
        index = np.arange(start, stop)
        places = copy_to_device(self.find_places(np.full_like(index, row), index), self._device)
        return self._routes[0].flatten(0, 1)[places].cpu().numpy()

    def find_places(self, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the positions of tokens in the flattened pages."""
        blocks = self.block_tables[rows, index // BLOCK_SIZE].astype(np.int64)
        return blocks * BLOCK_SIZE + index % BLOCK_SIZE

    def build_pattern(self, plan: StepPlan) -> PagedPattern | ExactPagedPattern:
        self.reserve(plan)
        copy = partial(copy_to_device, device=self._device)
        places = copy(self.find_places(*plan.flat()))
        if self.exact:
            return ExactPagedPattern(self, places, plan)
        is_single, offsets = plan.counts == 1, plan.offsets
        singles = chunks = None
        if is_single.any():
            part = plan.select(np.flatnonzero(is_single))
            width = -(-int(part.ends.max()) // BLOCK_SIZE)
            block_tables = np.ascontiguousarray(self.block_tables[part.rows, :width])
            singles = _Singles(copy(offsets[is_single]), copy(block_tables), copy(part.ends))
        if not is_single.all():
            part = plan.select(np.flatnonzero(~is_single))
            queries = np.arange(part.num_tokens)
            queries += np.repeat(offsets[~is_single] - part.offsets, part.counts)
            seen = StepPlan(part.rows, 0 * part.starts, part.ends, part.samples)
            keys, lengths = copy(self.find_places(*seen.flat())), (part.counts, part.ends)
            query_ends, key_ends = (copy(np.cumsum([0, *n]).astype(np.int32)) for n in lengths)
            num_queries, num_keys = (n.tolist() for n in lengths)
            chunks = _Chunks(copy(queries), keys, num_queries, num_keys, query_ends, key_ends)
        return PagedPattern(self, places, singles, chunks)


@dataclass(frozen=True, slots=True)
class _Singles:
    """Rows with one new token."""

    places: Int[Tensor, " rows"]
    """Positions of the queries in the run."""
    block_tables: BlockTables
    seq_lens: SeqLens


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Rows with several new tokens."""

    places: Int[Tensor, " queries"]
    """Positions of the queries in the run."""
    keys: Int[Tensor, " keys"]
    """Positions of the rows' keys in the flattened pages, row after row."""
    num_queries: list[int]
    num_keys: list[int]
    query_ends: Bounds
    key_ends: Bounds

    def attend(
        self,
        q: Float[Tensor, "queries heads width"],
        k: Float[Tensor, "keys kv_heads width"],
        v: Float[Tensor, "keys kv_heads value_width"],
        scaling: float,
    ) -> Float[Tensor, "queries heads value_width"]:
        if is_supported(q):
            ends = self.query_ends, max(self.num_queries), True, self.key_ends, max(self.num_keys)
            return attend_varlen(q, k, pad_values(v, k), scaling, *ends)[..., : v.shape[-1]]
        pairs = k.split(self.num_keys), v.split(self.num_keys)
        rows = zip(q.split(self.num_queries), *pairs, strict=True)
        return torch.cat([_attend_row(*row, scaling) for row in rows])


def _attend_row(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Return the attention output of one row whose queries are its last tokens."""
    sees = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = attend(q, k, v, attn_mask=sees, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


@dataclass(eq=False)
class PagedPattern:
    """`AttentionPattern` of one forward pass over the rows of a plan."""

    kv: KVCache
    places: Int[Tensor, " tokens"]
    singles: _Singles | None
    chunks: _Chunks | None
    state: None = None

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        run_q, run_k, run_v = (x[0].transpose(0, 1) for x in (q, k, v))
        keys, values = self.kv.pages(layer, run_k, run_v)
        flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
        flat_keys.index_copy_(0, self.places, run_k)
        flat_values.index_copy_(0, self.places, run_v)
        out = run_q.new_empty(*run_q.shape[:2], v.shape[-1])
        if (singles := self.singles) is not None:
            last = PagedKeys(keys, values, singles.block_tables, singles.seq_lens)
            attended = attend_pages(run_q[singles.places], last, scaling)
            out.index_copy_(0, singles.places, attended)
        if (chunks := self.chunks) is not None:
            seen = flat_keys[chunks.keys], flat_values[chunks.keys]
            out.index_copy_(0, chunks.places, chunks.attend(run_q[chunks.places], *seen, scaling))
        return out.transpose(0, 1).unsqueeze(0)


class ExactPagedPattern:
    """Attention pattern of one forward pass, in the same tiles as the trainer's sequences."""

    state = None

    def __init__(self, kv: KVCache, places: Int[Tensor, " tokens"], plan: StepPlan) -> None:
        self._kv, self._places, self._plan = kv, places, plan
        self._tiles: dict[int, Tiles] = {}

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        run_q, run_k, run_v = (x[0].transpose(0, 1) for x in (q, k, v))
        keys, values = self._kv.pages(layer, run_k, run_v)
        keys.flatten(0, 1).index_copy_(0, self._places, run_k)
        values.flatten(0, 1).index_copy_(0, self._places, run_v)
        queries = count_queries(q.shape[1], k.shape[1], q.device)
        if queries not in self._tiles:
            plan, width = self._plan, -(-int(self._plan.ends.max()) // BLOCK_SIZE)
            tables = self._kv.block_tables[plan.rows, :width]
            self._tiles[queries] = build_tiles(tables, plan.starts, plan.counts, queries, q.device)
        out = attend_run(run_q, keys, values, self._tiles[queries], scaling)
        return out.transpose(0, 1).unsqueeze(0)


@dataclass(eq=False)
class DecodePattern:
    """Attention pattern of a decode step, with a fixed number of rows for CUDA graphs."""

    kv: KVCache
    block_tables: BlockTables
    seq_lens: SeqLens
    """Length of each row including the new token; 0 for an idle row, which writes nothing."""
    state: None = None

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        run_q, run_k, run_v = (x[0].transpose(0, 1) for x in (q, k, v))
        pages = self.kv.pages(layer, run_k, run_v)
        seen = PagedKeys(*pages, self.block_tables, self.seq_lens)
        _write_last(run_k, run_v, seen)
        if self.kv.exact and not q.is_cuda:  # the GPU kernel is exact already
            queries = count_queries(q.shape[1], k.shape[1], q.device)
            repeated = run_q[:, None].expand(-1, queries, -1, -1)
            out = attend_tiles(repeated, seen, self.seq_lens, scaling)[:, 0]
        else:
            out = attend_pages(run_q, seen, scaling)
        return out.transpose(0, 1).unsqueeze(0)


def _write_last(k: Tensor, v: Tensor, seen: PagedKeys) -> None:
    if k.is_cuda:
        from sightline.compute.triton_kernels import write_paged

        write_paged(k, v, *seen)
        return
    keys, values, block_tables, seq_lens = seen
    rows = seq_lens.nonzero()[:, 0]
    last = seq_lens[rows].long() - 1
    places = block_tables[rows, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
    keys.flatten(0, 1).index_copy_(0, places, k[rows])
    values.flatten(0, 1).index_copy_(0, places, v[rows])


def attend_pages(
    q: Float[Tensor, "rows heads width"], seen: PagedKeys, scaling: float
) -> Float[Tensor, "rows heads value_width"]:
    """Return the attention output of each row's last token."""
    if q.is_cuda:
        from sightline.compute.triton_kernels import attend_paged

        return attend_paged(q, *seen, scaling)
    keys, values, block_tables, seq_lens = seen
    used = block_tables.reshape(-1)
    k, v = (
        pages.index_select(0, used).unflatten(0, block_tables.shape).flatten(1, 2).transpose(1, 2)
        for pages in (keys, values)
    )
    # An idle row sees one key: without any, its softmax would be undefined.
    sees = torch.arange(k.shape[2]) < seq_lens[:, None].clamp(min=1)
    mask = torch.where(sees, torch.zeros((), dtype=q.dtype), float("-inf"))[:, None, None]
    # Treat heads that share keys as more queries of one head, so that no key is repeated.
    grouped = q.unflatten(1, (k.shape[1], -1))
    return attend(grouped, k, v, attn_mask=mask, scale=scaling).flatten(1, 2)
