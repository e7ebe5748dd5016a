"""Requests in the engine, the table of rows that hold them, and the plan of a step.

Arrays hold the state of all sequences, so that a step over a hundred sequences takes only a few
array operations. A sequence has a row while it runs, and keeps it for its next turn until another
request needs it.

Dimensions: R rows, L tokens of a row, A position axes, K stop ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from sightline.compute.weights_digest import splitmix64
from sightline.inference.engine import EngineRequest
from sightline.inference.torch_engine.prefix_cache import PromptKey
from sightline.pixels import Pixels
from sightline.wire.generate import VersionSpan

NO_TOKEN = -1
# Maximum number of prompt chunks in a step. It bounds how long decoding sequences wait for their
# next token.
CHUNKS_PER_STEP = 8


@dataclass(slots=True, eq=False)
class TorchRequest(EngineRequest):
    row: int = -1
    next_position: int = 0
    """Position of the first token after the prompt."""
    waiting_bytes: int = 0
    """The request's share of `waiting_bytes`; 0 once it runs."""
    span_start: int = 0
    """Index of the first output token from the current version."""
    awaited_prompt: PromptKey | None = None
    """The prompt that another row is computing, and that this request will share."""
    pending: dict[str, Future[Pixels]] = field(default_factory=dict)
    pixels: dict[str, Pixels] = field(default_factory=dict)
    """Pixels of images that are not encoded yet, by key."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Features of images whose slots are not computed yet, by key."""

    def close_span(self, version: str, num_sampled: int) -> None:
        """Record that `version` sampled the output tokens up to `num_sampled`."""
        if num_sampled > self.span_start:
            self.spans.append(VersionSpan(version, self.span_start, num_sampled))
            self.span_start = num_sampled


@dataclass
class RowTable:
    num_rows: int
    max_model_len: int
    num_axes: int

    def __post_init__(self) -> None:
        shape = (self.num_rows, self.max_model_len)
        # The OS allocates pages on first write, so a large table costs only the memory in use.
        self.tokens = np.zeros(shape, dtype=np.int32)
        self.logprobs = np.zeros(shape, dtype=np.float32)
        self.positions = np.zeros((self.num_axes, *shape), dtype=np.int32)
        self.length = np.zeros(self.num_rows, dtype=np.int64)
        """Number of tokens: prompt and sampled."""
        self.computed = np.zeros(self.num_rows, dtype=np.int64)
        """Number of tokens in the KV cache."""
        self.pause = np.zeros(self.num_rows, dtype=np.int64)
        """Position at which a prefill pauses until the next step; 0 for none."""
        self.prompt_length = np.zeros(self.num_rows, dtype=np.int64)
        self.limit = np.zeros(self.num_rows, dtype=np.int64)
        self.temperature = np.ones(self.num_rows, dtype=np.float32)
        self.top_k = np.zeros(self.num_rows, dtype=np.int64)
        self.top_p = np.ones(self.num_rows, dtype=np.float32)
        self.min_p = np.zeros(self.num_rows, dtype=np.float32)
        self.seed = np.zeros(self.num_rows, dtype=np.uint64)
        self.stops = np.full((self.num_rows, 2), NO_TOKEN, dtype=np.int32)
        self.free = list(range(self.num_rows))
        self.on_release: Callable[[int], None] = lambda row: None

    def take_free(self) -> int:
        """Return the lowest free row, which keeps used rows close together."""
        return heapq.heappop(self.free)

    def release(self, row: int) -> None:
        self.on_release(row)
        heapq.heappush(self.free, row)

    def fill(self, row: int, request: TorchRequest, start: int, positions: np.ndarray) -> None:
        """Set up `row` for `request`, whose first `start` tokens it already holds.

        `positions` (A, prompt - start) belong to the new tokens.
        """
        size, params = len(request.prompt), request.params
        limit = size + params.max_tokens
        self.tokens[row, start:size] = request.prompt[start:]
        self.positions[:, row, start:size] = positions
        first = request.next_position
        self.positions[:, row, size:limit] = np.arange(first, first + params.max_tokens)
        self.length[row] = self.prompt_length[row] = size
        self.computed[row] = start
        self.pause[row] = 0
        self.limit[row] = limit
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        assert request.seed is not None
        self.seed[row : row + 1] = splitmix64(np.array([request.seed], dtype=np.uint64))
        stop_ids = params.stop_token_ids
        if len(stop_ids) > self.stops.shape[1]:
            more = len(stop_ids) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(stop_ids)] = stop_ids

    def append(self, rows: np.ndarray) -> np.ndarray:
        """Make room for one token in each of `rows`, and return its position."""
        at: np.ndarray = self.length[rows]
        self.length[rows] = at + 1
        return at

    def put(
        self, rows: np.ndarray, at: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
    ) -> np.ndarray:
        """Store sampled tokens at `at`, and return which rows sampled a stop id."""
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        return (self.stops[rows] == tokens[:, None]).any(axis=1)

    def num_sampled(self, row: int) -> int:
        return int(self.length[row] - self.prompt_length[row])

    def get_sampled(self, row: int) -> tuple[list[int], list[float]]:
        part = slice(int(self.prompt_length[row]), int(self.length[row]))
        return self.tokens[row, part].tolist(), self.logprobs[row, part].tolist()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows' new tokens in one step, concatenated into a flat run."""

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
        """Number of keys that each row's last token attends to."""
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

    def last(self) -> np.ndarray:
        """Return the positions of the last tokens of the rows that sample."""
        return (np.cumsum(self.counts) - 1)[self.samples]


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
