"""Model runner for recurrent layers. Each row has a state, which every token updates.

Rows that compute the same number of tokens form a batch without padding, so that a state sees only
its own sequence. A row's state belongs to its last computed token, even while the row waits for its
next turn. A state cannot be rewound: rows that share a prompt copy the state while the row that
computes the prompt is paused there.
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
from sightline.inference.torch_engine.row_table import StepPlan, TorchRequest

INITIAL_ROWS = 16


class RecurrentModelRunner(ModelRunner):
    """Runs steps of recurrent models. Only the engine's thread uses it."""

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
        # Encode for all parts at once, so that each image goes through the tower once.
        self._encode_missing(self._find_item_parts(plan, running))
        done, places = [], []
        label = 2 * plan.counts + (plan.starts == 0)
        for part in (np.flatnonzero(label == value) for value in np.unique(label)):
            batch = plan.select(part)
            state = self._states.take(batch.rows, is_new=not batch.starts[0])
            pattern = BatchPattern(self.kv.build_pattern(batch), state)
            done.append(self._forward(batch, running, pattern, num_rows=len(part)))
            self._states.put(batch.rows, state)
            places.append((plan.offsets[part, None] + np.arange(batch.counts[0])).reshape(-1))
        if len(done) == 1:
            return done[0]
        order = self._copy(np.argsort(np.concatenate(places)))
        return torch.cat(done)[order]


@dataclass(eq=False)
class BatchPattern:
    """Attention of rows with equally many new tokens, computed as one flat run."""

    run: AttentionPattern
    state: RecurrentCache

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scaling: float) -> Attended:
        shape = (q.shape[0], q.shape[2])
        q, k, v = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v))
        out = self.run.attend(layer, q, k, v, scaling)
        return out[0].unflatten(1, shape).transpose(0, 1)


class RecurrentCache(DynamicCache):
    """The states of a batch. Keys and values pass through, because the pattern stores them."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@dataclass
class RecurrentStates:
    """The rows' states between two steps: each layer's convolution inputs and memory."""

    config: Any
    max_num_seqs: int
    device: torch.device
    _tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for tables in self._tables.values() for table in tables)

    def take(self, rows: np.ndarray, is_new: bool) -> RecurrentCache:
        """Return a copy of the states of `rows`, which a forward pass updates."""
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
            if isinstance(carried, LinearAttentionLayer):  # other layers have a KV cache
                new = (carried.conv_states[0], carried.recurrent_states[0])
                old = self._tables.get(layer, (new[0][:0], new[1][:0]))
                inputs, memory = (self._grow_table(table, int(rows.max()) + 1) for table in old)
                inputs.index_copy_(0, index, new[0])
                memory.index_copy_(0, index, new[1])
                self._tables[layer] = (inputs, memory)

    def copy(self, source: int, row: int) -> None:
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
