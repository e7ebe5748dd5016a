"""Which tokens of which rows the next forward pass computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A step computes prompt tokens of several sequences; this many chunks together bound how long
# the sequences that decode wait for their next token.
CHUNKS_PER_STEP = 8


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows side by side in one flat run of tokens."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    """bool: the row's last known token is computed, so its next one can be sampled."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def ends(self) -> np.ndarray:
        """Keys that the last token of each row sees."""
        return self.starts + self.counts

    @property
    def offsets(self) -> np.ndarray:
        """Place in the flat run of the first token of each row."""
        return np.cumsum(self.counts) - self.counts

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and index in the row of every token."""
        if len(self.rows) == self.num_tokens:
            return self.rows, self.starts
        index = np.arange(self.num_tokens) - np.repeat(self.offsets - self.starts, self.counts)
        return np.repeat(self.rows, self.counts), index

    def select(self, part: np.ndarray) -> StepPlan:
        """The rows at the indices `part` alone."""
        return StepPlan(self.rows[part], self.starts[part], self.counts[part], self.samples[part])

    def group_by(self, label: np.ndarray) -> list[np.ndarray]:
        """Indices into the plan of the rows that have the same label."""
        return [np.flatnonzero(label == value) for value in np.unique(label)]

    def last(self) -> np.ndarray:
        """Places in the flat run of the tokens that predict the next one of a sampling row."""
        last: np.ndarray = (np.cumsum(self.counts) - 1)[self.samples]
        return last


def build_step_plan(
    rows: np.ndarray, length: np.ndarray, computed: np.ndarray, chunk: int, pause: np.ndarray
) -> StepPlan:
    """Every row that needs one token gets it; the others share a budget, first come first. A row
    that has not come to its `pause` yet gets no further."""
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
