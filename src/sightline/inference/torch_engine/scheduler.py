"""The scheduler of the embedded engine. It computes no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from sightline.compute.feature_cache import FeatureCache
from sightline.errors import EngineError
from sightline.families import Family
from sightline.inference.errors import build_engine_error, to_engine_error
from sightline.inference.fair_queue import FairQueue
from sightline.inference.torch_engine.observer import TorchCounters
from sightline.inference.torch_engine.prefix_cache import (
    CachedPrefix,
    ItemPlaces,
    PrefixCache,
    PromptKey,
    PromptRows,
)
from sightline.inference.torch_engine.row_table import RowTable, TorchRequest
from sightline.pixels import Materializer


@dataclass
class Scheduler:
    """Assigns rows to requests and finishes them. Only the engine's thread uses it."""

    rows: RowTable
    family: Family
    materializer: Materializer
    features: FeatureCache
    counters: TorchCounters
    enable_prefix_caching: bool
    share_prefix: Callable[[int, int, int], None]
    """Shares a row's first tokens with another: source, target, number of tokens."""
    wake_engine: Callable[[], None]
    has_room: Callable[[Sequence[int], Sequence[int]], bool]
    """Returns whether sequences of these lengths fit in addition to the content of these rows."""

    def __post_init__(self) -> None:
        self.waiting = FairQueue()
        self.loading: list[TorchRequest] = []
        self.running: dict[int, TorchRequest] = {}
        """Running requests by row, in the order in which they started."""
        self.done: list[TorchRequest] = []
        self.started_bytes = 0
        """Total bytes of all requests that have stopped waiting."""
        self.prefixes = PrefixCache()
        self.prompts = PromptRows()

    # --- admission

    def add(self, request: TorchRequest) -> None:
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        self.waiting.add(request)

    def admit(self) -> None:
        """Assign rows to waiting requests, in the order of the queue."""
        while self.rows.free or self.prefixes:
            if (next_request := self.waiting.find_next()) is None:
                return
            request = cast(TorchRequest, next_request)
            try:
                if not self._assign_row(request):
                    return
            except Exception as error:  # fails this request only
                if request.row < 0:
                    self.waiting.remove(request)
                else:
                    self.waiting.take(request)  # `fail` releases it with its row
                self.fail(request, to_engine_error(error))
                continue
            self.waiting.take(request)
            self.counters.cached_tokens += request.cached_tokens
            if request.awaited_prompt is None:
                self._load_items(request)
            else:
                self.loading.append(request)

    def _assign_row(self, request: TorchRequest) -> bool:
        """Assign a row: one that holds a prefix of the prompt, a free one, or the oldest cached."""
        start, cached = 0, None
        places = _find_item_places(request)
        reads_cache = self.enable_prefix_caching and not request.params.skip_reading_prefix_cache
        if reads_cache:
            cached = self.prefixes.take(request.prompt, places, self.rows.tokens)
        if cached is not None:
            request.row, prefix = cached
            start = prefix.length
            request.digests.update(prefix.digests)
        if not self._make_room(request):
            if cached is not None:
                self.prefixes[request.row] = cached[1]
                request.row = -1
            return False
        if cached is None:
            if not self.rows.free and not self._evict():
                return False
            request.row = self.rows.take_free()
        request.cached_tokens = start
        # For the whole prompt, because positions of a video may depend on cached steps.
        positions, request.next_position = self.family.positions(len(request.prompt), request.slots)
        self.rows.fill(request.row, request, start, positions[:, start:])
        if start == 0:
            self.prompts.forget(request.row)
            key = (request.prompt.tobytes(), places)
            # Each request computes the last token of its prompt, which predicts the next one.
            has_room = all(slot.end < len(request.prompt) for slot in request.slots)
            if reads_cache and has_room and key in self.prompts:
                request.awaited_prompt = key
            elif self.enable_prefix_caching:
                self.prompts.add(request.row, key, request.digests)
        return True

    def _make_room(self, request: TorchRequest) -> bool:
        """Evict cached rows, oldest first, until the request fits at its full length."""
        holding = [other.row for other in (*self.running.values(), *self.loading)]
        lengths = [len(request.prompt) + request.params.max_tokens]
        lengths += self.rows.limit[holding].tolist()
        while not self.has_room(lengths, list(self.prefixes)):
            if not self._evict():
                if holding:
                    return False
                problem = f"the KV cache has no room for a sequence of {lengths[0]} tokens"
                fix = "raise [inference] gpu_memory_utilization, or lower max_tokens"
                raise build_engine_error("engine", problem, fix)
        return True

    def _evict(self) -> bool:
        """Release the oldest cached row. Return False if there is none."""
        if (row := self.prefixes.evict()) is None:
            return False
        self.counters.rows_evicted += 1
        self._release_row(row)
        return True

    def _load_items(self, request: TorchRequest) -> None:
        """Get the features or pixels of slots that are not computed yet, then start the request."""
        computed = int(self.rows.computed[request.row])
        try:
            for slot, key in zip(request.slots, request.keys, strict=True):
                if slot.end <= computed or key in request.features or key in request.pixels:
                    continue
                if (cached := self.features.find(key)) is not None:
                    request.features[key] = cached.features
                    request.digests[key] = cached.digest
                elif key not in request.pending:
                    request.pending[key] = self.materializer.submit(slot.item)
        except Exception as error:  # fails this request only
            self.fail(request, to_engine_error(error))
            return
        if not request.pending:
            self._start(request)
            return
        self.loading.append(request)
        for flight in list(request.pending.values()):
            flight.add_done_callback(lambda _: self.wake_engine())

    def start_loaded(self) -> None:
        """Start the requests whose pixels are ready."""
        loading, self.loading = self.loading, []
        for request in loading:
            try:
                if request.awaited_prompt is not None:
                    self._share_prompt(request, request.awaited_prompt)
                elif all(flight.done() for flight in request.pending.values()):
                    for key, flight in request.pending.items():
                        request.pixels[key] = flight.result()
                        request.digests[key] = request.pixels[key].digest
                    request.pending.clear()
                    self._start(request)
                else:
                    self.loading.append(request)
            except Exception as error:  # such as bad media: fails this request only
                self.fail(request, to_engine_error(error))

    def _share_prompt(self, request: TorchRequest, key: PromptKey) -> None:
        """Start the request after its prompt, once another row has computed it.

        The request computes the prompt itself if that row is gone, or if its recurrent state has
        advanced past the prompt.
        """
        entry, length = self.prompts.get(key), len(request.prompt) - 1
        if entry is not None and self.family.packing.carries_state:
            self.rows.pause[entry[0]] = length
            if self.rows.computed[entry[0]] > length:
                self.prompts.forget(entry[0])
                entry = None
        if entry is not None:
            source, digests = entry
            if self.rows.computed[source] < length:
                self.loading.append(request)
                return
            self.share_prefix(source, request.row, length)
            self.rows.computed[request.row] = request.cached_tokens = length
            self.counters.cached_tokens += length
            request.digests.update((key, digests[key]) for key in request.keys)
        else:
            self.prompts.add(request.row, key, request.digests)
        request.awaited_prompt = None
        self._load_items(request)

    def _start(self, request: TorchRequest) -> None:
        self._stop_counting_as_waiting(request)
        self.running[request.row] = request

    # --- completion

    def finish(self, request: TorchRequest, reason: str, version: str) -> None:
        """Complete an answer, and keep its row for the next turn."""
        row = request.row
        request.tokens, request.logprobs = self.rows.get_sampled(row)
        request.finish_reason = reason
        request.close_span(version, len(request.tokens))
        self.counters.finished += 1
        if self.enable_prefix_caching:
            # The last sampled token is not in the KV cache yet.
            length = len(request.prompt) + len(request.tokens) - 1
            places = _find_item_places(request)
            self.prefixes[row] = CachedPrefix(length, places, request.digests)
            self._remove(request)
        else:
            self._release(request)

    def fail(self, request: TorchRequest, error: EngineError) -> None:
        request.error = error
        self.counters.failed += 1
        self._release(request)

    def abort(self, request: TorchRequest) -> None:
        """End a request whose client has disconnected."""
        if request.finish_reason or request.error is not None:
            return
        request.finish_reason = "abort"
        self.counters.cancelled += 1
        self.waiting.remove(request)
        self._release(request)

    def _stop_counting_as_waiting(self, request: TorchRequest) -> None:
        self.started_bytes += request.waiting_bytes
        request.waiting_bytes = 0

    def _release(self, request: TorchRequest) -> None:
        self._stop_counting_as_waiting(request)
        if request.row >= 0:
            self._release_row(request.row)
        self._remove(request)

    def _release_row(self, row: int) -> None:
        self.prompts.forget(row)
        self.rows.release(row)

    def _remove(self, request: TorchRequest) -> None:
        if self.running.get(request.row) is request:
            del self.running[request.row]
        elif request in self.loading:
            self.loading.remove(request)
        if request.row >= 0:
            self.waiting.release(request)
        request.row = -1
        request.features, request.pixels, request.pending = {}, {}, {}
        self.done.append(request)

    # --- weight updates

    def invalidate_after_update(self, old_version: str, keep_kv: bool, is_vision_new: bool) -> None:
        """Drop the old weights' results: KV cache unless `keep_kv`, features if `is_vision_new`."""
        unfinished = [*self.running.values(), *self.loading]
        self.running, self.loading = {}, []
        if keep_kv:
            self.prompts = PromptRows()  # new requests compute their prompts with the new weights
        else:
            for row in self.prefixes:
                self._release_row(row)
            self.prefixes.clear()
        for request in unfinished:
            num_sampled = self.rows.num_sampled(request.row)
            loses_kv = not keep_kv and bool(self.rows.computed[request.row])
            self.counters.prefilled_again += loses_kv
            request.close_span(old_version, num_sampled)
            if not keep_kv:
                self.rows.computed[request.row] = 0
                request.cached_tokens = 0
            if is_vision_new:
                request.features.clear()
            if request.awaited_prompt is not None:
                self.loading.append(request)
            else:
                self._load_items(request)


def _find_item_places(request: TorchRequest) -> ItemPlaces:
    offsets = (slot.offset for slot in request.slots)
    return tuple(zip(offsets, request.keys, strict=True))
