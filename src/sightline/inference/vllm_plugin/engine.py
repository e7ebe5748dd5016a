"""vLLM behind the shape that our server asks of an engine. It lives on the server's event loop.

    submit --> loading (pixels, in a pool) --> the gate --> vLLM --> deliver
    adopt  --> closes the gate, pauses vLLM, updates, recomputes, resumes, opens the gate

Waits for: pixels; the gate, while weights change; vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.errors import EngineError
from sightline.inference.busy_intervals import BusyIntervals
from sightline.inference.engine import Deliver
from sightline.inference.errors import build_engine_error, to_engine_error
from sightline.inference.settings import ServeSettings
from sightline.inference.vllm_plugin.conversion import read_output, to_vllm_params
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems, engine_key
from sightline.inference.vllm_plugin.request import VllmRequest
from sightline.inference.vllm_plugin.symbols import (
    MIN_TEMPERATURE,
    EngineDeadError,
    MultiModalKwargsItems,
    PlaceholderRange,
    VLLMClientError,
    find_refused_parameter,
    mm_input,
    tokens_input,
)
from sightline.inference.vllm_plugin.weight_updater import PartialUpdateError, WeightUpdater
from sightline.wire.weights import Manifest

MAX_ATTEMPTS = 3


@dataclass
class VllmCounters:
    """Since the start; written on the event loop alone."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_on_old_kv: int = 0
    adopted: int = 0
    prefilled_again: int = 0


class VllmEngine:
    def __init__(
        self,
        client: Any,
        items: MultiModalItems,
        updater: WeightUpdater,
        settings: ServeSettings,
        max_image_tokens: int,
        sampled_tokens: Callable[[], float],
    ) -> None:
        """`client` is vLLM's EngineClient; `sampled_tokens` counts those of its engine."""
        self.busy = BusyIntervals()
        self.counts = VllmCounters()
        self.on_fatal_error: Callable[[], None] = lambda: None
        self._client = client
        self._items = items
        self._updater = updater
        self._settings = settings
        self._max_image_tokens = max_image_tokens
        self._sampled_tokens = sampled_tokens
        self._live: set[VllmRequest] = set()
        self._request_numbers = itertools.count()
        self._is_stopping = False
        self._deliver: Deliver = lambda requests: None
        self._began = 0.0

    @property
    def manifest(self) -> Manifest:
        return self._updater.manifest

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._gate = asyncio.Event()
        self._gate.set()

    def stop(self) -> None:
        """Refuses what is unfinished. On the event loop."""
        self._is_stopping = True
        for request in list(self._live):
            self._cancel_request(request, _stopping_error())

    def join(self, timeout_s: float) -> None:
        self._items.materializer.close()

    @property
    def num_running(self) -> int:
        return min(self._settings.max_num_seqs, sum(request.is_running for request in self._live))

    @property
    def num_waiting(self) -> int:
        return len(self._live) - self.num_running

    def submit(self, requests: list[VllmRequest]) -> None:
        if self._is_stopping:
            raise _stopping_error()
        self._check_capacity(requests)
        if not self._live:
            self._began = time.time()
        for request in requests:
            self._live.add(request)
            self.counts.requests += 1
            self.counts.prompt_tokens += len(request.prompt)
            request.task = self._loop.create_task(self._run(request))

    def _check_capacity(self, requests: list[VllmRequest]) -> None:
        """A request that would wait alone is always taken."""
        most, most_bytes = self._settings.max_waiting, self._settings.max_waiting_bytes
        more = sum(request.nbytes for request in requests)
        if (
            self.num_waiting
            and len(self._live) + len(requests) > self._settings.max_num_seqs + most
        ):
            full = f"{self.num_waiting} requests wait, {most} may"
        elif self.num_waiting and self.waiting_bytes + more > most_bytes:
            full = f"requests of {self.waiting_bytes} bytes wait, {most_bytes} may"
        else:
            return
        raise build_engine_error("overloaded", full, "try again, or send fewer at once")

    @property
    def waiting_bytes(self) -> int:
        return sum(request.nbytes for request in self._live if not request.is_running)

    def cancel(self, request: VllmRequest) -> None:
        self._loop.call_soon_threadsafe(self._cancel_request, request, None)

    def adopt(self, path: Path) -> Manifest:
        """On a thread that is not the event loop's."""
        wanted = self._updater.read(path)
        if wanted.manifest == self.manifest:
            return wanted.manifest
        if self._is_stopping:
            raise _stopping_error()
        asyncio.run_coroutine_threadsafe(self._adopt(wanted), self._loop).result()
        return wanted.manifest

    async def _adopt(self, wanted: Any) -> None:
        self._gate.clear()
        try:
            running = [request for request in self._live if request.is_running]
            await self._updater.apply(wanted, self._settings.keep_kv_over_updates)
            self.counts.adopted += 1
            if not self._settings.keep_kv_over_updates:
                self.counts.prefilled_again += len(running)
        except (EngineDeadError, PartialUpdateError):
            self._fail_for_good()
            raise
        finally:
            self._gate.set()

    def totals(self) -> dict[str, float]:
        return {
            **dataclasses.asdict(self.counts),
            "sampled_tokens": self._sampled_tokens(),
            "busy_seconds": self.busy.seconds,
            **self._items.materializer.counts.totals(),
            "engine_cache_missed": self._items.num_cache_misses,
        }

    def now(self) -> dict[str, float]:
        return {
            "running": self.num_running,
            "waiting": self.num_waiting,
            "waiting_bytes": self.waiting_bytes,
            "pixel_cache_bytes": self._items.materializer.counts.bytes_held,
            "version": self.manifest.version,
            "vision_version": self.manifest.vision_version,
        }

    # --- one request

    async def _run(self, request: VllmRequest) -> None:
        try:
            self._check_request(request)
            for attempt in range(MAX_ATTEMPTS):
                if await self._attempt(request, bypass_cache=attempt > 0):
                    break
                self._items.num_cache_misses += 1
            else:
                raise build_engine_error("engine", "vLLM lost the images", "see the server's log")
            error = None
        except EngineDeadError as dead:
            self._fail_for_good()
            error = to_engine_error(dead)
        except VLLMClientError as refused:
            error = _refused_parameter_error(refused)
        except asyncio.CancelledError:
            # `_cancel_request` has delivered what it cancels; anything else must not leave a client waiting.
            self._finish(
                request, build_engine_error("engine", "the request was cancelled", "send it again")
            )
            raise
        except Exception as failed:  # a server's door: what fails costs its own request
            error = to_engine_error(failed)
            if error.status == 500:
                traceback.print_exc()
        self._finish(request, error)

    def _check_request(self, request: VllmRequest) -> None:
        if request.params.prompt_logprobs is not None:
            raise build_engine_error(
                "sampling",
                "sampling_params.prompt_logprobs: vLLM scores prompts as if no id were banned",
                "leave it out, or score with a server of the embedded engine",
            )
        if 0 < request.params.temperature < MIN_TEMPERATURE:
            raise build_engine_error(
                "sampling",
                f"sampling_params.temperature: {request.params.temperature} is under what vLLM "
                f"samples with, and it would take {MIN_TEMPERATURE} in silence",
                f"send 0, or {MIN_TEMPERATURE} to 2",
            )
        place = f"features.mm_placeholders.{self._items.family.modality}"
        for i, slot in enumerate(request.slots):
            if slot.length > self._max_image_tokens:
                raise build_engine_error(
                    "too_long",
                    f"{place}[{i}]: {slot.length} tokens, vLLM computes {self._max_image_tokens} "
                    "of an image at once",
                    "serve with a smaller max_pixels, or a larger max_len",
                )

    async def _attempt(self, request: VllmRequest, bypass_cache: bool) -> bool:
        """False when vLLM's engine did not hold an image that its cache had promised."""
        prompt, makes_all = None, bypass_cache
        while prompt is None:
            keys = [engine_key(key, self._updater.vision_label) for key in request.keys]
            prepared = await self._items.prepare(request.slots, keys, makes_all)
            await self._gate.wait()
            prompt = self._prompt(request, keys, prepared.made, bypass_cache)
            makes_all = True  # a second time nothing may hang on what vLLM lets go of
        request.digests, request.submitted_at = prepared.digests, time.monotonic()
        params = to_vllm_params(request.params, request.seed)
        request.is_running = True
        request.timeline.end("materialize")
        final: Any = None
        async for output in self._client.generate(
            prompt, params, f"sl-{next(self._request_numbers)}"
        ):
            final = output
        request.is_running = False
        request.timeline.end("vllm")
        if final is None or final.outputs[0].finish_reason == "error":
            return False
        read_output(request, final)
        if any(not math.isfinite(value) for value in request.logprobs):
            raise _not_finite_error()
        return True

    def _prompt(
        self, request: VllmRequest, keys: list[str], made: dict[str, Any], bypass_cache: bool
    ) -> Any | None:
        """vLLM's form of the request; None when what `keys` and `made` rest on has changed."""
        token_ids, salt = request.prompt.tolist(), self._updater.salt
        if not request.slots:
            return tokens_input(token_ids, cache_salt=salt)
        if keys[0] != engine_key(request.keys[0], self._updater.vision_label):
            return None
        handed = self._items.hand_over(keys, made, bypass_cache)
        if handed is None:
            return None
        modality = self._items.family.modality
        places = [
            PlaceholderRange(offset=slot.offset, length=slot.length) for slot in request.slots
        ]
        return mm_input(
            prompt_token_ids=token_ids,
            mm_kwargs=MultiModalKwargsItems({modality: handed}),
            mm_hashes={modality: keys},
            mm_placeholders={modality: places},
            cache_salt=salt,
        )

    def _cancel_request(self, request: VllmRequest, error: EngineError | None) -> None:
        """Ends a request from outside: with an error, or as cancelled."""
        if request not in self._live:
            return
        if request.task is not None:
            request.task.cancel()  # vLLM aborts what nobody reads any more
        request.finish_reason = "abort"
        self._finish(request, error)

    def _finish(self, request: VllmRequest, error: EngineError | None) -> None:
        if request not in self._live:
            return
        self._live.discard(request)
        request.error = error
        if error is not None:
            self.counts.failed += 1
        elif request.finish_reason == "abort":
            self.counts.cancelled += 1
        else:
            self.counts.finished += 1
            self.counts.cached_tokens += request.cached_tokens
            if self._settings.keep_kv_over_updates:
                self.counts.tokens_on_old_kv += request.count_tokens_on_old_kv(
                    self._updater.update_times
                )
        if not self._live:
            self.busy.add(self._began)
        self._deliver([request])

    def _fail_for_good(self) -> None:
        if not self._is_stopping:
            traceback.print_exc()
            self.on_fatal_error()


def _refused_parameter_error(error: Exception) -> EngineError:
    """What vLLM does not take: here and there its bounds are narrower than the protocol's."""
    name = find_refused_parameter(error)
    path = f"sampling_params.{name}" if name else "sampling_params"
    return build_engine_error(
        "sampling", f"{path}: {error}", "stay within what vLLM takes: see docs/vllm.md"
    )


def _stopping_error() -> EngineError:
    return build_engine_error(
        "stopping", "the server is ending", "send the request to another server"
    )


def _not_finite_error() -> EngineError:
    return build_engine_error(
        "not_finite",
        "the model's logits are not numbers",
        "check the weights that were published last",
    )
