"""Who has a row, who waits for pixels, who runs, who is done. No tensor is computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from sightline.compute.feature_cache import FeatureCache
from sightline.errors import EngineError
from sightline.families import Family
from sightline.inference.errors import build_engine_error, to_engine_error
from sightline.inference.fair_queue import FairQueue
from sightline.inference.torch_engine.observer import EngineObserver
from sightline.inference.torch_engine.prefix_cache import (
    CachedPrefix,
    ItemPlaces,
    PrefixCache,
    PromptKey,
    PromptRows,
)
from sightline.inference.torch_engine.request import TorchRequest
from sightline.inference.torch_engine.row_table import RowTable
from sightline.pixels import Materializer


@dataclass
class Scheduler:
    """Used by the engine's thread alone."""

    rows: RowTable
    family: Family
    materializer: Materializer
    features: FeatureCache
    observer: EngineObserver
    enable_prefix_caching: bool
    share_prefix: Callable[[int, int, int], None]
    """Lets a row (the second) begin with so many tokens of another (the first)."""
    wake_engine: Callable[[], None]
    has_room: Callable[[Sequence[int], Sequence[int]], bool]
    """Whether the KV cache holds sequences of these lengths, beside what these rows have."""

    def __post_init__(self) -> None:
        self.waiting = FairQueue()
        self.loading: list[TorchRequest] = []
        self.running: dict[int, TorchRequest] = {}
        """Requests that run, by row, in the order in which they began."""
        self.done: list[TorchRequest] = []
        self.started_bytes = 0
        """Bytes of the requests that have waited and wait no more, since the start."""
        self.prefixes = PrefixCache()
        self.prompts = PromptRows()

    def active(self) -> np.ndarray:
        """Rows that run."""
        return np.fromiter(self.running, dtype=np.int64, count=len(self.running))

    # --- in

    def add(self, request: TorchRequest) -> None:
        self.observer.on_added(request)
        self.waiting.add(request)

    def admit(self) -> None:
        """Gives rows to waiting requests, in the order of the queue."""
        while (found := self.waiting.find_next()) is not None:
            request = cast(TorchRequest, found)
            try:
                if not self._assign_row(request):
                    return
            except Exception as error:  # a request costs itself only
                if request.row < 0:
                    self.waiting.remove(request)
                else:
                    self.waiting.take(request)  # and given back with its row
                self.fail(request, to_engine_error(error))
                continue
            self.waiting.take(request)
            self.observer.on_admitted(request)
            if request.awaited_prompt is None:
                self._load_items(request)
            else:
                self.loading.append(request)

    def _assign_row(self, request: TorchRequest) -> bool:
        """Finds a row: one that holds the prompt's beginning, a free one, or the oldest cached."""
        start, found = 0, None
        places = _find_item_places(request)
        reads_cache = self.enable_prefix_caching and not request.params.skip_reading_prefix_cache
        if reads_cache:
            found = self.prefixes.take(request.prompt, places, self.rows.tokens)
        if found is not None:
            request.row, prefix = found
            start = prefix.length
            request.digests.update(prefix.digests)
        if not self._make_room(request):
            if found is not None:
                self.prefixes[request.row] = found[1]
                request.row = -1
            return False
        if found is None:
            if (row := self._find_free_row()) is None:
                return False
            request.row = row
        request.cached_tokens = start
        # Of the whole prompt: the steps of a video may hang on one that the cache holds.
        positions, request.next_position = self.family.positions(len(request.prompt), request.slots)
        self.rows.fill(request.row, request, start, positions[:, start:])
        if start == 0:
            self.prompts.forget(request.row)
            key = (request.prompt.tobytes(), places)
            # The last token of a prompt is computed by each: the next one hangs on it.
            has_room = all(slot.end < len(request.prompt) for slot in request.slots)
            if reads_cache and has_room and self.prompts.find(key) is not None:
                request.awaited_prompt = key
            elif self.enable_prefix_caching:
                self.prompts.add(request.row, key, request.digests)
        return True

    def _make_room(self, request: TorchRequest) -> bool:
        """Whether the KV cache has room for the request at its full length, beside those that run;
        rows that wait for a next turn give way, the one that waits longest first."""
        holding = [one.row for one in (*self.running.values(), *self.loading)]
        lengths = [len(request.prompt) + request.params.max_tokens]
        lengths += self.rows.limit[holding].tolist()
        while not self.has_room(lengths, list(self.prefixes)):
            row = self.prefixes.evict()
            if row is None:
                if holding:
                    return False
                raise build_engine_error(
                    "engine",
                    f"the KV cache has no room for a sequence of {lengths[0]} tokens",
                    "raise [inference] gpu_memory_utilization, or ask for fewer tokens",
                )
            self.observer.on_row_evicted()
            self._release_row(row)
        return True

    def _find_free_row(self) -> int | None:
        row = self.rows.take_free()
        if row is None:
            row = self.prefixes.evict()
            if row is not None:
                self.observer.on_row_evicted()
                self._release_row(row)
                row = self.rows.take_free()
        return row

    def _load_items(self, request: TorchRequest) -> None:
        """Collects what the slots that are not computed yet need, and lets the request begin."""
        computed = int(self.rows.computed[request.row])
        try:
            for slot, key in zip(request.slots, request.keys, strict=True):
                if slot.end <= computed or key in request.features or key in request.pixels:
                    continue
                if (shown := self.features.find(key)) is not None:
                    request.features[key] = shown.features
                    request.digests[key] = shown.digest
                elif key not in request.pending:
                    request.pending[key] = self.materializer.submit(slot.item)
        except Exception as error:  # a bad item costs its request only
            self.fail(request, to_engine_error(error))
            return
        if not request.pending:
            self._start(request)
            return
        self.loading.append(request)
        for flight in list(request.pending.values()):
            flight.add_done_callback(lambda _: self.wake_engine())

    def start_loaded(self) -> None:
        """Lets those run whose pixels are all there."""
        loading, self.loading = self.loading, []
        for request in loading:
            if request.awaited_prompt is not None:
                try:
                    self._share_prompt(request, request.awaited_prompt)
                except Exception as error:  # a full device costs this request only
                    self.fail(request, to_engine_error(error))
                continue
            if not all(flight.done() for flight in request.pending.values()):
                self.loading.append(request)
                continue
            try:
                for key, flight in request.pending.items():
                    request.pixels[key] = flight.result()
                    request.digests[key] = request.pixels[key].digest
            except Exception as error:  # bad media costs its request only
                self.fail(request, to_engine_error(error))
                continue
            request.pending.clear()
            self._start(request)

    def _share_prompt(self, request: TorchRequest, key: PromptKey) -> None:
        """Lets the request begin behind its prompt, once the row that computes it has done so; by
        itself where that row is gone, or its state has gone on."""
        found, length = self.prompts.find(key), len(request.prompt) - 1
        if found is not None and self.family.packing.carries_state:
            self.rows.pause[found[0]] = length
            if self.rows.computed[found[0]] > length:
                self.prompts.forget(found[0])
                found = None
        if found is not None:
            source, digests = found
            if self.rows.computed[source] < length:
                self.loading.append(request)
                return
            self.share_prefix(source, request.row, length)
            self.rows.computed[request.row] = request.cached_tokens = length
            self.rows.has_stale_kv[request.row] = self.rows.has_stale_kv[source]
            self.observer.on_prompt_shared(length)
            request.digests.update((key, digests[key]) for key in request.keys)
        else:
            self.prompts.add(request.row, key, request.digests)
        request.awaited_prompt = None
        self._load_items(request)

    def _start(self, request: TorchRequest) -> None:
        self.observer.on_started(request)
        self._stop_counting_as_waiting(request)
        self.running[request.row] = request

    # --- out

    def finish(self, request: TorchRequest, reason: str, version: str) -> None:
        """The answer is complete; the row waits for the next turn."""
        row = request.row
        request.tokens, request.logprobs = self.rows.get_sampled(row)
        request.finish_reason = reason
        request.close_span(version, len(request.tokens))
        self.observer.on_finished(request)
        if self.enable_prefix_caching:
            self.prefixes[row] = self._build_cached_prefix(request)
            self._remove(request)
        else:
            self._release(request)

    def _build_cached_prefix(self, request: TorchRequest) -> CachedPrefix:
        """The last sampled token is not in the KV cache yet: nothing has followed it."""
        num_sampled = len(request.tokens) - 1
        return CachedPrefix(
            length=len(request.prompt) + num_sampled,
            places=_find_item_places(request),
            digests=request.digests,
        )

    def fail(self, request: TorchRequest, error: EngineError) -> None:
        request.error = error
        self.observer.on_failed()
        self._release(request)

    def abort(self, request: TorchRequest) -> None:
        """Ends a request whose client is gone, wherever it is."""
        if request.finish_reason or request.error is not None:
            return
        request.finish_reason = "abort"
        self.observer.on_cancelled()
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

    # --- new weights

    def invalidate_after_update(self, old_version: str, keep_kv: bool, is_vision_new: bool) -> None:
        """After a weight update: drops what the old weights computed, unless `keep_kv`."""
        unfinished = [*self.running.values(), *self.loading]
        self.running, self.loading = {}, []
        if keep_kv:
            # A row that has computed nothing yet has nothing old in it, and one that is filled from
            # the start loses the mark.
            self.rows.has_stale_kv |= self.rows.computed > 0
            self.prompts = PromptRows()  # who comes now computes its prompt by the new weights
        else:
            for row in self.prefixes:
                self._release_row(row)
            self.prefixes.clear()
        for request in unfinished:
            num_sampled = self.rows.num_sampled(request.row)
            loses_kv = not keep_kv and bool(self.rows.computed[request.row])
            self.observer.on_interrupted(request, num_sampled, loses_kv)
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
