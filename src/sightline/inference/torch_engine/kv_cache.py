"""The KV cache of a CPU: keys and values of the rows, each in one place, and the attention over
them.

A forward pass gets its tokens in one flat run, so that the linear layers compute no padding.
Attention writes the run's keys and values into their rows, then lets rows of like shape attend
together: those with one new token, and those with a chunk of them, each by length.

Heads that share keys ask as further queries of one head, so that no key is repeated for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.compute.attention import attend
from sightline.compute.attention_cudnn import pad_rows
from sightline.compute.attention_shapes import Attended, Keys, Queries, Values
from sightline.inference.torch_engine.step_plan import StepPlan

KeyTable = Float[Tensor, "all_rows max_tokens kv_heads width"]
ValueTable = Float[Tensor, "all_rows max_tokens kv_heads value_width"]

INITIAL_ROWS = 16
INITIAL_LEN = 128
# Rows up to this length attend together; beyond it, the padding of the shorter costs more than
# a second call.
SMALLEST_BUCKET = 256


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    rows: slice | Tensor
    num_rows: int
    num_queries: int
    width: int
    mask: Float[Tensor, "rows 1 queries keys"]
    """0 where a query sees a key, else -inf."""
    queries: Int[Tensor, " padded"] | None
    """Places in the run, short rows padded with their first token; None: all, in order."""
    real: Int[Tensor, " real"] | None
    """Which of the padded queries are no padding; None: all."""
    places: Int[Tensor, " real"] | None
    """Where those belong in the run; None: all, in order."""


class KVCache:
    """Grows by doubling, up to what the settings allow. Used by the engine's thread alone."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, device: torch.device, dtype: torch.dtype
    ):
        self._max = (max_num_seqs, max_model_len)
        self._device = device
        self._dtype = dtype
        self.size = (0, 0)
        """Rows, and tokens of a row, that there is room for."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def token_bytes(self) -> int:
        """Memory of one token in all layers; 0 before the first pass, which shows their shapes."""
        return sum(table.stride(1) * table.element_size() for table in self._tables())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables())

    def _tables(self) -> list[Tensor]:
        return [*self._keys.values(), *self._values.values()]

    def reserve(self, rows: int, length: int) -> None:
        """Room for `rows` rows of `length` tokens."""
        size = (
            grow_size(self.size[0], rows, INITIAL_ROWS, self._max[0]),
            grow_size(self.size[1], length, INITIAL_LEN, self._max[1]),
        )
        if size != self.size:
            for tables in (self._keys, self._values):
                for layer, old in tables.items():
                    tables[layer] = new = self._zeros(size, old.shape[2:])
                    new[: self.size[0], : self.size[1]] = old
            self.size = size

    def zero_row(self, row: int) -> None:
        """Zeroes a row that holds something other than numbers: masked keys must be finite."""
        if row < self.size[0]:
            for table in self._tables():
                table[row].zero_()

    def has_room(self, lengths: Sequence[int], rows: Sequence[int]) -> bool:
        """Every row may be as long as the longest sequence."""
        return True

    def share_prefix(self, source: int, row: int, length: int) -> None:
        """Copies the first `length` tokens of `source` to `row`."""
        self.reserve(max(source, row) + 1, length)
        for table in self._tables():
            table[row, :length] = table[source, :length]

    def write(
        self,
        layer: int,
        k: Float[Tensor, "tokens kv_heads width"],
        v: Float[Tensor, "tokens kv_heads value_width"],
        places: Int[Tensor, " tokens"],
    ) -> tuple[KeyTable, ValueTable]:
        """Writes a run to `places`; returns the layer's keys and values."""
        if layer not in self._keys:
            self._keys[layer] = self._zeros(self.size, k.shape[1:])
            self._values[layer] = self._zeros(self.size, v.shape[1:])
        keys, values = self._keys[layer], self._values[layer]
        keys.flatten(0, 1).index_copy_(0, places, k)
        values.flatten(0, 1).index_copy_(0, places, v)
        return keys, values

    def _zeros(self, size: tuple[int, int], heads: torch.Size) -> Tensor:
        return torch.zeros(*size, *heads, device=self._device, dtype=self._dtype)

    def build_pattern(self, plan: StepPlan) -> KVCachePattern:
        self.reserve(int(plan.rows.max()) + 1, int(plan.ends.max()))
        rows, index = plan.flat()
        places = self._index(rows * self.size[1] + index)
        groups = [self._group(plan, part) for part in _group_by_length(plan)]
        return KVCachePattern(self, places, groups)

    def _group(self, plan: StepPlan, part: np.ndarray) -> _AttentionGroup:
        offsets, num_queries = plan.offsets[part], int(plan.counts[part].max())
        places, is_real = pad_rows(offsets, offsets + plan.counts[part], num_queries)
        num_seen = places + (plan.starts[part] - offsets + 1)[:, None]
        width = int(plan.ends[part].max())
        in_order = places.size == plan.num_tokens and bool(is_real.all())
        return _AttentionGroup(
            rows=self._rows(plan.rows[part]),
            num_rows=len(part),
            num_queries=num_queries,
            width=width,
            mask=self.mask(self._index(num_seen), width),
            queries=None if in_order else self._index(places.reshape(-1)),
            real=None if is_real.all() else self._index(np.flatnonzero(is_real)),
            places=None if in_order else self._index(places[is_real]),
        )

    def mask(
        self, seen: Int[Tensor, "rows queries"], width: int
    ) -> Float[Tensor, "rows 1 queries keys"]:
        """What is added to scores: 0 for the first `seen` keys, else -inf."""
        sees = torch.arange(width, device=self._device) < seen[:, None, :, None]
        nothing = torch.zeros((), device=self._device, dtype=self._dtype)
        return torch.where(sees, nothing, float("-inf"))

    def _rows(self, rows: np.ndarray) -> slice | Tensor:
        """A slice, which copies nothing, where the rows are neighbours."""
        if bool((np.diff(rows) == 1).all()):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return self._index(rows)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


@dataclass(eq=False)
class KVCachePattern:
    """One forward pass over the rows of a plan: an `AttentionPattern`."""

    kv: KVCache
    places: Tensor
    groups: list[_AttentionGroup]
    state: None = None
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        run_q, run_k, run_v = (x[0].transpose(0, 1) for x in (q, k, v))
        keys, values = self.kv.write(layer, run_k, run_v, self.places)
        if len(self.groups) == 1 and self.groups[0].places is None:
            out = self._attend(0, run_q, keys, values, scaling)
        else:
            out = run_q.new_empty(*run_q.shape[:2], v.shape[-1])
            for i, group in enumerate(self.groups):
                part = self._attend(i, run_q, keys, values, scaling)
                assert group.places is not None
                out.index_copy_(0, group.places, part)
        return out.transpose(0, 1).unsqueeze(0)

    def _attend(
        self,
        i: int,
        run: Float[Tensor, "tokens heads width"],
        keys: KeyTable,
        values: ValueTable,
        scaling: float,
    ) -> Float[Tensor, "real heads value_width"]:
        """What the tokens of group `i` attend to."""
        group = self.groups[i]
        q = run if group.queries is None else run[group.queries]
        shared = q.shape[1] // keys.shape[2]
        q = q.unflatten(0, (group.num_rows, group.num_queries)).unflatten(2, (-1, shared))
        out = attend(
            q.permute(0, 2, 3, 1, 4).flatten(2, 3),
            _select_rows(keys, group),
            _select_rows(values, group),
            attn_mask=self._mask(i, shared),
            scale=scaling,
        )
        out = out.unflatten(2, (shared, -1)).permute(0, 3, 1, 2, 4)
        flat = out.flatten(2, 3).flatten(0, 1)
        return flat if group.real is None else flat[group.real]

    def _mask(self, i: int, shared: int) -> Float[Tensor, "rows 1 shared_queries keys"]:
        """The mask of group `i` for heads that share keys, made once for all layers."""
        mask = self.groups[i].mask
        if shared == 1 or mask.shape[2] == 1:
            return mask
        if (i, shared) not in self._masks:
            repeated = mask.unsqueeze(2).expand(-1, -1, shared, -1, -1)
            self._masks[i, shared] = repeated.flatten(2, 3)
        return self._masks[i, shared]


def _select_rows(table: Tensor, group: _AttentionGroup) -> Tensor:
    part = table[:, : group.width]
    rows = part[group.rows] if isinstance(group.rows, slice) else part.index_select(0, group.rows)
    return rows.transpose(1, 2)


def _group_by_length(plan: StepPlan) -> list[np.ndarray]:
    """Indices into the plan of the rows that attend together."""
    bucket = np.maximum(np.ceil(np.log2(plan.ends)), np.log2(SMALLEST_BUCKET)).astype(np.int64)
    return plan.group_by(2 * bucket + (plan.counts > 1))


def grow_size(have: int, need: int, first: int, most: int) -> int:
    """A size of at least `need`, by doubling."""
    if need <= have:
        return have
    size = max(have, first)
    while size < need:
        size *= 2
    return min(size, most)
