"""The tokens of each row that the next forward pass computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Maximum number of prompt chunks in a step. It bounds how long decoding sequences wait for their
# next token.
CHUNKS_PER_STEP = 8


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows one after another in a flat run of tokens."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    """bool: whether the row's last token is computed, so that the next one can be sampled."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def ends(self) -> np.ndarray:
        """Number of keys that each row's last token sees."""
        return self.starts + self.counts

    @property
    def offsets(self) -> np.ndarray:
        """Position of each row's first token in the flat run."""
        return np.cumsum(self.counts) - self.counts

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the row, and the index in the row, of every token."""
        if len(self.rows) == self.num_tokens:
            return self.rows, self.starts
        index = np.arange(self.num_tokens) - np.repeat(self.offsets - self.starts, self.counts)
        return np.repeat(self.rows, self.counts), index

    def select(self, part: np.ndarray) -> StepPlan:
        """Return a plan of the rows at the indices `part`."""
        return StepPlan(self.rows[part], self.starts[part], self.counts[part], self.samples[part])

    def group_by(self, label: np.ndarray) -> list[np.ndarray]:
        """Return the indices of the rows with each label."""
        return [np.flatnonzero(label == value) for value in np.unique(label)]

    def last(self) -> np.ndarray:
        """Return the positions of the last tokens of the rows that sample."""
        last: np.ndarray = (np.cumsum(self.counts) - 1)[self.samples]
        return last


def build_step_plan(
    rows: np.ndarray, length: np.ndarray, computed: np.ndarray, chunk: int, pause: np.ndarray
) -> StepPlan:
    """Plan one token for each row that decodes, and chunks of prompts within a budget.

    Prompts get their share in order of arrival. A row does not compute past its `pause`.
    """
    starts = computed[rows]
    need = length[rows] - starts
    counts = np.minimum(need, chunk)
    counts = np.where(starts < pause[rows], np.minimum(counts, pause[rows] - starts), counts)
    prefill = np.where(need > 1, counts, 0)
    before = np.cumsum(prefill) - prefill
    left = np.maximum(chunk * CHUNKS_PER_STEP - before, 0)
    counts = np.where(need > 1, np.minimum(counts, left), counts)
    if (counts == 0).any():
        computes = counts > 0
        rows, starts, counts, need = (x[computes] for x in (rows, starts, counts, need))
    return StepPlan(rows, starts, counts, counts == need)
