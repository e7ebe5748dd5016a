"""Decode steps of fixed shape, which a GPU replays as CUDA graphs.

On a GPU, a pass over a few hundred tokens takes less time than Python needs to launch its kernels.
Rows that compute only their last sampled token therefore go through a pass whose numbers of rows
and pages are rounded up. Idle places attend to no keys and cost almost nothing. A shape is captured
when it occurs for the second time, and replayed from then on. Input tokens stay on the device, so
that the host can launch a step before it has read the tokens of the last one. A model that cannot
be captured runs without graphs.
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
from sightline.families.experts import Routes
from sightline.inference.torch_engine.kv_cache import BLOCK_SIZE, DecodePattern, KVCache
from sightline.inference.torch_engine.row_table import RowTable, StepPlan

MAX_SHAPES = 64
MIN_PAGES = 1024 // BLOCK_SIZE
# Columns of a pass's input array. Positions and pages follow.
_ROW, _SEQ_LEN, _FIRST_AXIS = range(3)


@dataclass(slots=True)
class _ShapePass:
    """The buffers and the graph of one shape."""

    inputs: Int32[Tensor, "rows columns"]
    """Row, number of keys, position axes and pages of each place."""
    graph: torch.cuda.CUDAGraph | None = None
    logits: Float[Tensor, "rows vocab"] | None = None
    routes: Routes | None = None
    """The experts of the rows, if the model has any."""


@dataclass
class CudaGraphDecoder:
    """Runs decode steps of fixed shape. Only the engine's thread uses it."""

    forward: Forward
    kv: KVCache
    rows: RowTable
    device: torch.device

    def __post_init__(self) -> None:
        self._passes: LRUCache[tuple[int, int], _ShapePass] = LRUCache(MAX_SHAPES)
        self._computed: set[tuple[int, int]] = set()
        self._generation = -1
        self._captures = self.device.type == "cuda"
        num_places = self.rows.num_rows + 1  # one more than rows, for idle places
        self._last_tokens = torch.zeros(num_places, dtype=torch.int64, device=self.device)
        self.num_passes = 0
        self.num_replayed = 0

    def find_rows(self, plan: StepPlan) -> Bool[np.ndarray, " rows"]:
        """Return which rows of the plan compute only their last sampled token."""
        is_sampled = plan.starts >= self.rows.prompt_length[plan.rows]
        return (plan.counts == 1) & plan.samples & is_sampled

    def put_tokens(self, rows: np.ndarray, tokens: Int64[Tensor, " rows"]) -> None:
        self._last_tokens.index_copy_(0, copy_to_device(rows, self.device), tokens)

    def drop_graphs(self) -> None:
        """Forget all graphs, because the model's operations have changed."""
        self._computed.clear()
        self._generation = -1

    def logits(self, plan: StepPlan) -> Logits:
        """Return the logits of the next token of rows that `find_rows` selected.

        The next call overwrites them.
        """
        self.kv.reserve(plan)
        num_rows = round_up_shape(len(plan.rows))
        num_pages = round_up_shape(max(MIN_PAGES, -(-int(plan.ends.max()) // BLOCK_SIZE)))
        shape_pass = self._get_pass(num_rows, num_pages)
        inputs = copy_to_device(self._inputs(plan, num_rows, num_pages), self.device)
        shape_pass.inputs.copy_(inputs, non_blocking=True)
        if shape_pass.graph is None or shape_pass.logits is None:
            logits, routes = self._compute(shape_pass.inputs)
        else:
            shape_pass.graph.replay()
            logits, routes = shape_pass.logits, shape_pass.routes
            self.num_replayed += 1
        if routes is not None:  # without the padding rows
            self.kv.put_routes(plan, routes[: len(plan.rows)])
        self.num_passes += 1
        return logits[: len(plan.rows)]

    def _inputs(
        self, plan: StepPlan, num_rows: int, num_pages: int
    ) -> Int32[np.ndarray, "rows columns"]:
        """Return the input array of a pass. Idle places have length 0."""
        table, rows, at = self.rows, plan.rows, plan.starts
        first_page, used = _FIRST_AXIS + table.num_axes, len(plan.rows)
        inputs = np.zeros((num_rows, first_page + num_pages), dtype=np.int32)
        inputs[:, _ROW] = table.num_rows
        inputs[:used, _ROW] = rows
        inputs[:used, _SEQ_LEN] = at + 1
        inputs[:used, _FIRST_AXIS:first_page] = table.positions[:, rows, at].T
        pages = self.kv.block_tables[rows, :num_pages]
        inputs[:used, first_page : first_page + pages.shape[1]] = pages
        inputs[:used, first_page + pages.shape[1] :] = pages[:, -1:]
        return inputs

    def _get_pass(self, num_rows: int, num_pages: int) -> _ShapePass:
        if self._generation != self.kv.generation:  # graphs refer to pages by address
            self._passes.clear()
            self._generation = self.kv.generation
            # All graphs share memory, because no output is read after the next graph runs.
            self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        shape = (num_rows, num_pages)
        shape_pass = self._passes.get(shape)
        if shape_pass is None:
            columns = _FIRST_AXIS + self.rows.num_axes + num_pages
            inputs = torch.zeros(num_rows, columns, dtype=torch.int32, device=self.device)
            inputs[:, _ROW] = self.rows.num_rows
            shape_pass = self._passes[shape] = _ShapePass(inputs)
        if self._captures and shape_pass.graph is None and shape in self._computed:
            self._capture(shape_pass)
        self._computed.add(shape)
        return shape_pass

    def _compute(self, inputs: Int32[Tensor, "rows columns"]) -> tuple[Logits, Routes | None]:
        first_page = _FIRST_AXIS + self.rows.num_axes
        positions: Int[Tensor, "axes rows"] = inputs[:, _FIRST_AXIS:first_page].T.long()
        seq_lens = inputs[:, _SEQ_LEN].contiguous()
        pattern = DecodePattern(self.kv, inputs[:, first_page:], seq_lens)
        token_ids = self._last_tokens[inputs[:, _ROW].long()]
        hidden = self.forward.hidden(token_ids[None], positions[:, None], None, None, pattern)
        routing = getattr(self.forward, "routing", None)
        return self.forward.logits(hidden[0]), routing.get_routes() if routing else None

    def _capture(self, shape_pass: _ShapePass) -> None:
        """Capture a graph. The shape has run once before, so its setup is complete."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                shape_pass.logits, shape_pass.routes = self._compute(shape_pass.inputs)
            shape_pass.graph = graph
        except RuntimeError as error:
            shape_pass.logits = None
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream active
            # Running out of memory does not mean that the model cannot be captured.
            for cause in (error, error.__context__):
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            self._captures = False
            print(f"decoding without graphs: {str(error).splitlines()[0]}", file=sys.stderr)


def round_up_shape(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()
