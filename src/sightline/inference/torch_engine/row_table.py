"""The table of rows: the state of every sequence, as arrays, so that a step over a hundred
sequences costs a few array operations. A sequence has a row while it runs, and keeps it for its
next turn until another request needs it.

Letters: R rows, L tokens of a row, A position axes, K stop ids.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sightline.inference.torch_engine.request import TorchRequest
from sightline.inference.torch_engine.sampling import splitmix64

NO_TOKEN = -1


@dataclass
class RowTable:
    num_rows: int
    max_model_len: int
    num_axes: int

    def __post_init__(self) -> None:
        shape = (self.num_rows, self.max_model_len)
        # The system allocates memory when it is written, so a large table costs only what is used.
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
        """Maximum length of the sequence."""
        self.temperature = np.ones(self.num_rows, dtype=np.float32)
        self.top_k = np.zeros(self.num_rows, dtype=np.int64)
        self.top_p = np.ones(self.num_rows, dtype=np.float32)
        self.min_p = np.zeros(self.num_rows, dtype=np.float32)
        self.seed = np.zeros(self.num_rows, dtype=np.uint64)
        self.stops = np.full((self.num_rows, 2), NO_TOKEN, dtype=np.int32)
        self.banned: dict[int, tuple[int, ...]] = {}
        """Ids that a request bans in addition to the pads, by row."""
        self.has_stale_kv = np.zeros(self.num_rows, dtype=bool)
        """Whether the row's KV cache is of an older version."""
        self.free = list(range(self.num_rows))
        self.on_release: Callable[[int], None] = lambda row: None
        """Called with each released row."""

    def take_free(self) -> int | None:
        """Return the lowest free row, which keeps used rows close together."""
        return heapq.heappop(self.free) if self.free else None

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
        self._fill_stops(row, params.stop_token_ids)
        self.banned.pop(row, None)
        if params.banned_token_ids:
            self.banned[row] = params.banned_token_ids
        if start == 0:
            self.has_stale_kv[row] = False

    def _fill_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
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
        hit: np.ndarray = (self.stops[rows] == tokens[:, None]).any(axis=1)
        return hit

    def num_sampled(self, row: int) -> int:
        return int(self.length[row] - self.prompt_length[row])

    def get_sampled(self, row: int) -> tuple[list[int], list[float]]:
        part = slice(int(self.prompt_length[row]), int(self.length[row]))
        return self.tokens[row, part].tolist(), self.logprobs[row, part].tolist()
