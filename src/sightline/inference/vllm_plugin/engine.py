"""An `Engine` that forwards requests to vLLM. It runs on the server's event loop.

    submit --> waiting --> loading (pixels, in a pool) --> the gate --> vLLM --> deliver
    adopt  --> closes the gate, pauses vLLM, updates, recomputes, resumes, opens the gate

vLLM serves requests in order of arrival. To keep the queue fair, the engine sends it at most
`max_num_seqs` requests at a time.

Waits for: a free place in vLLM; pixels; the gate, while weights change; vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sightline.errors import EngineError
from sightline.inference.engine import Deliver, Engine, EngineCounters, EngineRequest
from sightline.inference.errors import (
    build_engine_error,
    not_finite_error,
    stopping_error,
    to_engine_error,
)
from sightline.inference.fair_queue import FairQueue
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin import symbols
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems, engine_key
from sightline.inference.vllm_plugin.weight_updater import (
    CheckedWeights,
    PartialUpdateError,
    WeightUpdater,
)
from sightline.wire.generate import SamplingParams, VersionSpan
from sightline.wire.weights import Manifest

MAX_ATTEMPTS = 3
MAX_TEMPERATURE = 2.0
MAX_VLLM_SEED = 2**63
"""Exclusive upper bound of vLLM's seeds. Larger seeds are reduced modulo this value."""


@dataclass(slots=True, eq=False)
class VllmRequest(EngineRequest):
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    """Whether the request has been passed to vLLM."""


class VllmEngine(Engine):
    request_class = VllmRequest

    def __init__(
        self,
        client: Any,
        items: MultiModalItems,
        updater: WeightUpdater,
        spec: ServerSpec,
        max_image_tokens: int,
        sampled_tokens: Callable[[], float],
    ) -> None:
        """`client` is vLLM's EngineClient. `sampled_tokens` returns the tokens sampled so far."""
        super().__init__(spec, items.materializer, EngineCounters())
        self._client = client
        self._items = items
        self._updater = updater
        self._max_image_tokens = max_image_tokens
        self._sampled_tokens = sampled_tokens
        self._live: set[VllmRequest] = set()
        self._queue = FairQueue()
        self._request_numbers = itertools.count()
        self._num_handed_over = 0
        self._busy_since = 0.0
        self._last_sampled = self._sampled_at = self._next_look = 0.0

    @property
    def manifest(self) -> Manifest:
        return self._updater.manifest

    def _choose_shard(self, rollout_id: str) -> int | None:
        """Return the data-parallel rank that holds a rollout's KV cache, or None for any rank."""
        size = self._client.vllm_config.parallel_config.data_parallel_size
        return zlib.crc32(rollout_id.encode()) % size if rollout_id and size > 1 else None

    def start(self, deliver: Deliver) -> None:
        """Start on the running event loop. `deliver` is called on the same loop."""
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._gate = asyncio.Event()
        self._gate.set()

    async def take_first_weights(self) -> None:
        """Label the weights that vLLM loaded. If the spec names other weights, adopt them."""
        await self._client.update_weight_version(self.manifest.label)
        if self._spec.weights is not None:
            await asyncio.to_thread(self.adopt, self._spec.weights)

    def stop(self) -> None:
        """Refuse unfinished requests. Call it on the event loop."""
        self._is_stopping = True
        for request in list(self._live):
            self._cancel_request(request, stopping_error())

    def join(self, timeout_s: float) -> None:
        super().join(timeout_s)
        self._items.pool.shutdown(wait=False)

    @property
    def num_running(self) -> int:
        """Number of requests in vLLM, capped at `max_num_seqs`.

        vLLM does not report which of them are queued or preempted.
        """
        running = sum(request.is_running for request in self._live)
        return min(self._spec.inference.max_num_seqs, running)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - self.num_running

    @property
    def step_s(self) -> float:
        """Seconds since vLLM last sampled a token; 0 while it is idle or its weights change."""
        if not self._num_handed_over or not self._gate.is_set():
            return 0.0
        now = time.monotonic()
        if now >= self._next_look:  # workers poll every second, and the metric is expensive
            self._next_look = now + 1.0
            if (sampled := self._sampled_tokens()) != self._last_sampled:
                self._last_sampled, self._sampled_at = sampled, now
        return now - self._sampled_at

    @property
    def waiting_bytes(self) -> int:
        return sum(request.nbytes for request in self._live if not request.is_running)

    def _count_waiting_with(self, num_more: int) -> int:
        # Requests that load pixels count as waiting, but already have a place in vLLM.
        return len(self._live) + num_more - self._spec.inference.max_num_seqs

    def submit(self, requests: list[VllmRequest]) -> None:
        self._check_accepts(requests)
        for request in requests:
            self._live.add(request)
            self.counters.requests += 1
            self.counters.prompt_tokens += len(request.prompt)
            self._queue.add(request)
        self._admit()

    def _admit(self) -> None:
        """Start waiting requests while vLLM has room."""
        room = self._spec.inference.max_num_seqs + len(self._queue) - len(self._live)
        for _ in range(0 if self._is_stopping else min(room, len(self._queue))):
            request = cast(VllmRequest, self._queue.find_next())
            self._queue.take(request)
            request.task = self._loop.create_task(self._run(request))

    def cancel(self, request: VllmRequest) -> None:
        self._loop.call_soon_threadsafe(self._cancel_request, request, None)

    def _open_update(self, folder: Path, manifest: Manifest) -> AbstractContextManager[Any]:
        return nullcontext(self._updater.read(folder, manifest))

    def _take_update(self, update: CheckedWeights) -> None:
        asyncio.run_coroutine_threadsafe(self._adopt(update), self._loop).result()

    async def _adopt(self, update: CheckedWeights) -> None:
        keep_kv = self._spec.inference.keep_kv_over_updates
        self._gate.clear()
        try:
            running = [request for request in self._live if request.is_running]
            await self._updater.apply(update, keep_kv)
            self.counters.adopted += 1
            if not keep_kv:
                self.counters.prefilled_again += len(running)
        except (symbols.EngineDeadError, PartialUpdateError):
            self._fail_for_good()
            raise
        finally:
            self._sampled_at = time.monotonic()
            self._gate.set()

    def totals(self) -> dict[str, float]:
        self._note_busy(0)
        return {**super().totals(), "sampled_tokens": self._sampled_tokens()}

    def _note_busy(self, change: int) -> None:
        """Count the time since the last call as busy if vLLM had requests. Apply `change`."""
        if self._num_handed_over:
            self.busy.add(self._busy_since)
        else:
            self._sampled_at = time.monotonic()
        self._busy_since = time.time()
        self._num_handed_over += change

    # --- one request

    async def _run(self, request: VllmRequest) -> None:
        try:
            self._check_request(request)
            for attempt in range(MAX_ATTEMPTS):
                if await self._attempt(request, bypass_cache=attempt > 0):
                    break
            else:
                problem = "vLLM's cache lost the images"
                raise build_engine_error("engine", problem, "see the server's log")
            error = None
        except symbols.EngineDeadError as dead:
            self._fail_for_good()
            error = to_engine_error(dead)
        except symbols.VLLMClientError as refused:
            fix = "use a value that vLLM supports: see docs/vllm.md"
            error = build_engine_error("sampling", f"sampling_params: {refused}", fix)
        except asyncio.CancelledError:
            # If `_cancel_request` did not cause this, the client still needs an answer.
            cancelled = build_engine_error("engine", "the request was cancelled", "send it again")
            self._finish(request, cancelled)
            raise
        except Exception as failed:  # fails this request only
            error = to_engine_error(failed)
        self._finish(request, error)

    def _check_request(self, request: VllmRequest) -> None:
        if request.params.prompt_logprobs is not None:
            problem = "sampling_params.prompt_logprobs: vLLM does not mask banned ids in prompts"
            fix = "leave it out, or score with the embedded engine"
            raise build_engine_error("sampling", problem, fix)
        if request.params.reward:
            problem = "sampling_params.reward: rewards from vLLM are not implemented"
            raise build_engine_error("sampling", problem, "use the embedded engine")
        if request.params.routes_from is not None:
            problem = "sampling_params.routes_from: routes from vLLM are not implemented"
            fix = "leave it out, or use the embedded engine"
            raise build_engine_error("sampling", problem, fix)
        temperature = request.params.temperature
        if temperature and not symbols.MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            problem = f"sampling_params.temperature: {temperature} is outside vLLM's bounds"
            fix = f"send 0, or {symbols.MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
            raise build_engine_error("sampling", problem, fix)
        place = f"features.mm_placeholders.{self._items.family.modality}"
        for i, slot in enumerate(request.slots):
            if slot.length > self._max_image_tokens:
                raise build_engine_error(
                    "too_long",
                    f"{place}[{i}]: it has {slot.length} tokens, but vLLM encodes at most "
                    f"{self._max_image_tokens} tokens of an image",
                    "serve with a smaller max_pixels, or a larger max_model_len",
                )

    async def _attempt(self, request: VllmRequest, bypass_cache: bool) -> bool:
        """Run a request. Return False if vLLM's engine lacked an image that its cache listed."""
        prompt, makes_all = None, bypass_cache
        while prompt is None:
            keys = [engine_key(key, self._updater.vision_label) for key in request.keys]
            new_items, digests = await self._items.prepare(request.slots, keys, makes_all)
            await self._gate.wait()
            prompt = self._prompt(request, keys, new_items, bypass_cache)
            makes_all = True  # do not rely on vLLM's cache a second time
        request.digests = dict(zip(request.keys, digests, strict=True))
        params = to_vllm_params(request.params, request.seed)
        request.is_running = True
        self._note_busy(1)
        final: Any = None
        try:
            name = f"sl-{next(self._request_numbers)}"
            shard = self._choose_shard(request.request_id)
            outputs = self._client.generate(prompt, params, name, data_parallel_rank=shard)
            async for output in outputs:
                final = output
        finally:
            request.is_running = False
            self._note_busy(-1)
        if final is None or final.outputs[0].finish_reason == "error":
            return False
        read_output(request, final)
        if any(not math.isfinite(value) for value in request.logprobs):
            raise not_finite_error()
        return True

    def _prompt(
        self, request: VllmRequest, keys: list[str], new_items: dict[str, Any], bypass_cache: bool
    ) -> Any | None:
        """Return the request as vLLM's input, or None if the vision weights or cache changed."""
        token_ids, salt = request.prompt.tolist(), self._updater.salt
        if not request.slots:
            return symbols.tokens_input(token_ids, cache_salt=salt)
        if keys[0] != engine_key(request.keys[0], self._updater.vision_label):
            return None
        mm_items = self._items.hand_over(keys, new_items, bypass_cache)
        if mm_items is None:
            return None
        modality = self._items.family.modality
        mask = self._items.feature_mask
        places = [symbols.PlaceholderRange(s.offset, s.length, mask(s)) for s in request.slots]
        return symbols.mm_input(
            prompt_token_ids=token_ids,
            mm_kwargs=symbols.MultiModalKwargsItems({modality: mm_items}),
            mm_hashes={modality: keys},
            mm_placeholders={modality: places},
            cache_salt=salt,
        )

    def _cancel_request(self, request: VllmRequest, error: EngineError | None) -> None:
        """End a request with an error, or as cancelled."""
        if request not in self._live:
            return
        if request.task is not None:
            request.task.cancel()  # vLLM then aborts the request
        request.finish_reason = "abort"
        self._finish(request, error)

    def _finish(self, request: VllmRequest, error: EngineError | None) -> None:
        if request not in self._live:
            return
        self._live.discard(request)
        if request.task is None:
            self._queue.remove(request)
        else:
            self._queue.release(request)
        self._admit()
        request.error = error
        if error is not None:
            self.counters.failed += 1
        elif request.finish_reason == "abort":
            self.counters.cancelled += 1
        else:
            self.counters.finished += 1
            self.counters.cached_tokens += request.cached_tokens
        self._deliver([request])

    def _fail_for_good(self) -> None:
        if not self._is_stopping:
            traceback.print_exc()
            self.on_fatal_error()


def to_vllm_params(params: SamplingParams, seed: int | None) -> symbols.SamplingParams:
    return symbols.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=None if seed is None else seed % MAX_VLLM_SEED,
        stop_token_ids=list(params.stop_token_ids),
        # Only the request's stop ids end an answer, not the checkpoint's.
        ignore_eos=True,
        max_tokens=params.max_tokens,
        logprobs=0,
        detokenize=False,
        output_kind=symbols.RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
    )


def read_output(request: VllmRequest, final: Any) -> None:
    output = final.outputs[0]
    request.tokens = list(output.token_ids)
    pairs = zip(request.tokens, output.logprobs or [], strict=True)
    request.logprobs = [entry[token].logprob for token, entry in pairs]
    versions = output.weight_versions or []
    request.spans = [VersionSpan(span.version, span.start, span.end) for span in versions]
    request.finish_reason = output.finish_reason
    request.cached_tokens = final.num_cached_tokens or 0
