"""Models with layers that carry a state from token to token: each row has a state of its own.

Rows that compute equally many tokens go through the model together, as a batch without padding: a
state sees the tokens of its own sequence and nothing else. A row's state stands behind its last
computed token, also while the row waits for its next turn, which goes on from there; a row that is
computed from the start begins without one. A state cannot be cut back: rows that share a prompt
take it over while the row that computes the prompt stands there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from sightline.compute.attention import AttentionPattern
from sightline.compute.attention_shapes import Attended, Keys, Queries, Values
from sightline.compute.logprobs import Hidden
from sightline.families.device_copy import copy_to_device
from sightline.inference.torch_engine.model_runner import ModelRunner
from sightline.inference.torch_engine.request import TorchRequest
from sightline.inference.torch_engine.step_plan import StepPlan

INITIAL_ROWS = 16


class RecurrentModelRunner(ModelRunner):
    """Used by the engine's thread alone."""

    decodes_in_graphs = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._states = RecurrentStates(self.forward.model.config, self.rows.num_rows, self._device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._states.nbytes

    def share_prefix(self, source: int, row: int, length: int) -> None:
        super().share_prefix(source, row, length)
        self._states.copy(source, row)

    def hidden(self, plan: StepPlan, running: dict[int, TorchRequest]) -> Hidden:
        """Hidden states of the plan's tokens; KV cache and states hold them afterwards."""
        # Before the parts: an image goes through the tower once.
        self._encode_missing(self._find_item_parts(plan, running))
        done, places = [], []
        for part in plan.group_by(2 * plan.counts + (plan.starts == 0)):
            picked = plan.select(part)
            state = self._states.take(picked.rows, is_new=not picked.starts[0])
            pattern = BatchPattern(self.kv.build_pattern(picked), state)
            done.append(self._forward(picked, running, pattern, num_rows=len(part)))
            self._states.put(picked.rows, state)
            places.append((plan.offsets[part, None] + np.arange(picked.counts[0])).reshape(-1))
        if len(done) == 1:
            return done[0]
        order = self._copy(np.argsort(np.concatenate(places)))
        return torch.cat(done)[order]


@dataclass(eq=False)
class BatchPattern:
    """A batch of rows with equally many new tokens, over rows that attend in one flat run."""

    run: AttentionPattern
    state: RecurrentCache

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        shape = (q.shape[0], q.shape[2])
        q, k, v = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v))
        out = self.run.attend(layer, q, k, v, scaling)
        return out[0].unflatten(1, shape).transpose(0, 1)


class RecurrentCache(DynamicCache):
    """The states of a batch. Keys and values are the pattern's business: they pass through."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@dataclass
class RecurrentStates:
    """The states of the rows between two steps: by layer, the inputs that its convolution still
    sees and its memory. Grows with the rows in use. Used by the engine's thread alone."""

    config: Any
    max_num_seqs: int
    device: torch.device
    _tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for tables in self._tables.values() for table in tables)

    def take(self, rows: np.ndarray, is_new: bool) -> RecurrentCache:
        """A copy of the states of `rows`, for a forward pass to update."""
        state = RecurrentCache(config=self.config)
        if not is_new:
            index = copy_to_device(rows, self.device)
            for layer, (inputs, memory) in self._tables.items():
                state.update_conv_state(inputs[index], layer, conv_kernel_size=inputs.shape[-1])
                state.update_recurrent_state(memory[index], layer)
        return state

    def put(self, rows: np.ndarray, state: RecurrentCache) -> None:
        index = copy_to_device(rows, self.device)
        for layer, carried in enumerate(state.layers):
            if isinstance(carried, LinearAttentionLayer):  # the others have a KV cache
                new = (carried.conv_states[0], carried.recurrent_states[0])
                old = self._tables.get(layer, (new[0][:0], new[1][:0]))
                inputs, memory = (self._grow_table(table, int(rows.max()) + 1) for table in old)
                inputs.index_copy_(0, index, new[0])
                memory.index_copy_(0, index, new[1])
                self._tables[layer] = (inputs, memory)

    def copy(self, source: int, row: int) -> None:
        """Gives `row` the state of `source`."""
        for layer, tables in self._tables.items():
            inputs, memory = (self._grow_table(table, row + 1) for table in tables)
            inputs[row], memory[row] = inputs[source], memory[source]
            self._tables[layer] = (inputs, memory)

    def _grow_table(self, table: Tensor, num_rows: int) -> Tensor:
        """Return the table with room for `num_rows` rows. It grows by doubling."""
        if num_rows <= len(table):
            return table
        size = min(max(num_rows, 2 * len(table), INITIAL_ROWS), self.max_num_seqs)
        return torch.cat([table, table.new_zeros(size - len(table), *table.shape[1:])])
