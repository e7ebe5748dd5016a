"""The next token of every row as a pass of fixed shape, which a GPU replays as one graph.

On a GPU a pass over a few hundred tokens is over before Python has asked for its kernels. Where a
row computes the one token that was sampled last, it takes a place in a pass of so many rows and
pages, both rounded up: idle places see nothing and cost next to nothing. Shapes repeat, so a pass
is captured when its shape comes again, and replayed from then on. The token comes from where it was
sampled, on the device: the host asks for a step before it knows what the step before has said. A
model whose pass cannot be captured (it looks at its values on the way) runs without a graph.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from cachetools import LRUCache
from jaxtyping import Bool, Float, Int, Int32, Int64
from torch import Tensor

from sightline.compute.logprobs import Logits
from sightline.families import Forward
from sightline.families.device_copy import copy_to_device
from sightline.inference.torch_engine.kv_cache import BLOCK_SIZE, DecodePattern, KVCache
from sightline.inference.torch_engine.row_table import RowTable
from sightline.inference.torch_engine.step_plan import StepPlan

MAX_SHAPES = 64
MIN_PAGES = 1024 // BLOCK_SIZE
# Columns of the array that a pass is given; positions and pages follow.
_ROW, _SEQ_LEN, _FIRST_AXIS = range(3)


@dataclass(slots=True)
class _ShapePass:
    """What one shape needs from step to step."""

    inputs: Int32[Tensor, "rows columns"]
    """For each place its row, how many keys it sees, its position axes and its pages."""
    graph: torch.cuda.CUDAGraph | None = None
    logits: Float[Tensor, "rows vocab"] | None = None
    """Where the graph leaves its result."""


@dataclass
class CudaGraphDecoder:
    """Used by the engine's thread alone."""

    forward: Forward
    kv: KVCache
    rows: RowTable
    device: torch.device

    def __post_init__(self) -> None:
        self._passes: LRUCache[tuple[int, int], _ShapePass] = LRUCache(MAX_SHAPES)
        self._computed: set[tuple[int, int]] = set()
        self._generation = -1
        self._captures = self.device.type == "cuda"
        # One behind the last, for idle places.
        self._last_tokens = torch.zeros(
            self.rows.num_rows + 1, dtype=torch.int64, device=self.device
        )
        self.num_passes = 0
        self.num_replayed = 0

    def find_rows(self, plan: StepPlan) -> Bool[np.ndarray, " rows"]:
        """Which rows of the plan compute just the token that was sampled last."""
        is_sampled = plan.starts >= self.rows.prompt_length[plan.rows]
        found: np.ndarray = (plan.counts == 1) & plan.samples & is_sampled
        return found

    def put_tokens(self, rows: np.ndarray, tokens: Int64[Tensor, " rows"]) -> None:
        """Remembers what the rows have sampled last."""
        self._last_tokens.index_copy_(0, copy_to_device(rows, self.device), tokens)

    def logits(self, plan: StepPlan) -> Logits:
        """Those of the next token of the plan's rows, which `find_rows` has found.

        The next call overwrites them.
        """
        self.kv.reserve(plan)
        num_rows = round_up_shape(len(plan.rows))
        num_pages = round_up_shape(max(MIN_PAGES, -(-int(plan.ends.max()) // BLOCK_SIZE)))
        found = self._get_pass(num_rows, num_pages)
        inputs = copy_to_device(self._inputs(plan, num_rows, num_pages), self.device)
        found.inputs.copy_(inputs, non_blocking=True)
        if found.graph is None or found.logits is None:
            logits = self._compute(found.inputs)
        else:
            found.graph.replay()
            logits = found.logits
            self.num_replayed += 1
        self.num_passes += 1
        return logits[: len(plan.rows)]

    def _inputs(
        self, plan: StepPlan, num_rows: int, num_pages: int
    ) -> Int32[np.ndarray, "rows columns"]:
        """An idle place has seen nothing."""
        table, rows, at = self.rows, plan.rows, plan.starts
        first_page, used = _FIRST_AXIS + table.num_axes, len(plan.rows)
        made = np.zeros((num_rows, first_page + num_pages), dtype=np.int32)
        made[:, _ROW] = table.num_rows
        made[:used, _ROW] = rows
        made[:used, _SEQ_LEN] = at + 1
        made[:used, _FIRST_AXIS:first_page] = table.positions[:, rows, at].T
        pages = self.kv.block_tables[rows, :num_pages]
        made[:used, first_page : first_page + pages.shape[1]] = pages
        made[:used, first_page + pages.shape[1] :] = pages[:, -1:]
        return made

    def _get_pass(self, num_rows: int, num_pages: int) -> _ShapePass:
        if self._generation != self.kv.generation:  # graphs know the pages by their addresses
            self._passes.clear()
            self._generation = self.kv.generation
            # One memory for all of them: none is read when the next one runs.
            self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        shape = (num_rows, num_pages)
        found = self._passes.get(shape)
        if found is None:
            columns = _FIRST_AXIS + self.rows.num_axes + num_pages
            inputs = torch.zeros(num_rows, columns, dtype=torch.int32, device=self.device)
            inputs[:, _ROW] = self.rows.num_rows
            found = self._passes[shape] = _ShapePass(inputs)
        if self._captures and found.graph is None and shape in self._computed:
            self._capture(found)
        self._computed.add(shape)
        return found

    def _compute(self, inputs: Int32[Tensor, "rows columns"]) -> Logits:
        first_page = _FIRST_AXIS + self.rows.num_axes
        positions: Int[Tensor, "axes rows"] = inputs[:, _FIRST_AXIS:first_page].T.long()
        seq_lens = inputs[:, _SEQ_LEN].contiguous()
        pattern = DecodePattern(self.kv, inputs[:, first_page:], seq_lens)
        token_ids = self._last_tokens[inputs[:, _ROW].long()]
        hidden = self.forward.hidden(token_ids[None], positions[:, None], None, None, pattern)
        return self.forward.logits(hidden[0])

    def _capture(self, found: _ShapePass) -> None:
        """The shape was computed once before, so that nothing is set up during the capture."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                found.logits = self._compute(found.inputs)
            found.graph = graph
        except RuntimeError as error:
            found.logits = None
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
            # A full device says nothing about the model. How a capture ends may hide why it did.
            for cause in (error, error.__context__):
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            self._captures = False
            print(f"decoding without graphs: {str(error).splitlines()[0]}", file=sys.stderr)


def round_up_shape(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
