"""The next token of every row as a pass of fixed shape, which a GPU replays as one graph.

On a GPU a pass over a few hundred tokens is over before Python has asked for its kernels. Where
every row of a step computes one token, the pass takes the table's first rows, idle ones among
them, and as many keys as the longest needs, both rounded up. Shapes repeat, so a pass is captured
when its shape comes again, and replayed from then on. A model whose pass cannot be captured (it
looks at its values on the way) runs without a graph.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from cachetools import LRUCache
from jaxtyping import Float, Int64
from torch import Tensor

from sightline.compute.logprobs import Hidden
from sightline.families import Forward
from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.row_table import RowTable
from sightline.inference.torch_engine.step_plan import StepPlan

MAX_SHAPES = 48
MIN_WIDTH = 256
# KV cache of idle rows that a pass may look at. To read more takes longer than Python does
# to launch the pass without a graph.
MAX_IDLE_KV_BYTES = 16 * 2**30
# Rows of the array that a pass is given; positions follow.
_TOKEN, _PLACE, _SEEN, _FIRST_AXIS = range(4)


@dataclass(slots=True)
class _ShapePass:
    """What one shape needs from step to step."""

    inputs: Int64[Tensor, "fields rows"]
    """For each row its next token, where its keys go, how many it sees, and its position axes."""
    width: int
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Float[Tensor, "rows hidden"] | None = None
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
        self._generation = -1
        self._captures = self.device.type == "cuda"
        self.num_passes = 0
        self.num_replayed = 0

    def hidden(self, plan: StepPlan) -> Hidden | None:
        """Hidden states of the plan's tokens, or None where the plan is none for this."""
        table = self.rows
        if (plan.counts != 1).any() or (plan.starts < table.prompt_length[plan.rows]).any():
            return None
        if not (token_bytes := self.kv.token_bytes):
            return None
        needed, longest = int(plan.rows.max()) + 1, int(plan.ends.max())
        self.kv.reserve(needed, longest)
        num_rows = min(round_up_shape(needed), self.kv.size[0])
        width = min(round_up_shape(max(longest, MIN_WIDTH)), self.kv.size[1])
        if (num_rows - len(plan.rows)) * width * token_bytes > MAX_IDLE_KV_BYTES:
            return None
        found = self._get_pass(num_rows, width)
        found.inputs.copy_(torch.from_numpy(self._inputs(plan, num_rows)), non_blocking=True)
        if found.graph is None or found.hidden is None:
            hidden = self._compute(found)
        else:
            found.graph.replay()
            hidden = found.hidden
            self.num_replayed += 1
        self.num_passes += 1
        if len(plan.rows) == num_rows and bool((np.diff(plan.rows) == 1).all()):
            return hidden
        return hidden[torch.from_numpy(plan.rows).to(self.device)]

    def _inputs(self, plan: StepPlan, num_rows: int) -> Int64[np.ndarray, "fields rows"]:
        """An idle row shows token 0, sees one key, and writes behind the last row."""
        table, (all_rows, all_tokens) = self.rows, self.kv.size
        made = np.zeros((_FIRST_AXIS + table.num_axes, num_rows), dtype=np.int64)
        made[_PLACE] = all_rows * all_tokens + np.arange(num_rows) % all_tokens
        made[_SEEN] = 1
        rows, at = plan.rows, plan.starts
        made[_TOKEN, rows] = table.tokens[rows, at]
        made[_PLACE, rows] = rows * all_tokens + at
        made[_SEEN, rows] = at + 1
        made[_FIRST_AXIS:, rows] = table.positions[:, rows, at]
        return made

    def _get_pass(self, num_rows: int, width: int) -> _ShapePass:
        if self._generation != self.kv.generation:  # graphs know the tables by their addresses
            self._passes.clear()
            self._generation = self.kv.generation
        found = self._passes.get((num_rows, width))
        if found is None:
            shape = (_FIRST_AXIS + self.rows.num_axes, num_rows)
            inputs = torch.zeros(shape, dtype=torch.int64, device=self.device)
            found = self._passes[num_rows, width] = _ShapePass(inputs, width)
        elif self._captures and found.graph is None:
            self._capture(found)
        return found

    def _compute(self, found: _ShapePass) -> Float[Tensor, "rows hidden"]:
        inputs = found.inputs
        pattern = self.kv.build_decode_pattern(inputs[_PLACE], inputs[_SEEN], found.width)
        token_ids, positions = inputs[_TOKEN, None], inputs[_FIRST_AXIS:, None]
        return self.forward.hidden(token_ids, positions, None, None, pattern)[0]

    def _capture(self, found: _ShapePass) -> None:
        """The shape was computed once before, so that nothing is set up during the capture."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found.hidden = self._compute(found)
            found.graph = graph
        except RuntimeError as error:
            self._captures = False
            found.hidden = None
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
            print(f"decoding without graphs: {str(error).splitlines()[0]}", file=sys.stderr)


def round_up_shape(count: int) -> int:
    """At least `count`: a power of two, or one and a half times one."""
    power = 1 << (count - 1).bit_length()
    smaller = power * 3 // 4
    return smaller if smaller >= max(count, 3) else power
