"""The loop of the embedded engine, on a thread of its own.

    submit --> inbox --> waiting --a row--> loading --pixels--> running --> done --> deliver
    adopt  --> swaps     between two steps
    cancel --> cancels   between two steps

A step computes the next token of every row that decodes and, within a budget, chunks of prompts,
in one forward pass: a request that arrives late gets its first token while others decode.

Waits for: a submission, an update, a cancellation or pixels, and only when no row can compute.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from sightline.compute.feature_cache import FeatureCache
from sightline.compute.lora_weights import AdapterBase
from sightline.compute.model import load_model, pick_device
from sightline.compute.weights import adopt_into, read_tensors, read_weights
from sightline.errors import EngineError
from sightline.families import Family, Forward
from sightline.inference.engine import Deliver, Engine
from sightline.inference.errors import not_finite_error, stopping_error, to_engine_error
from sightline.inference.server_spec import MEBIBYTE, ServerSpec
from sightline.inference.torch_engine.model_runner import ModelRunner
from sightline.inference.torch_engine.recurrent_runner import RecurrentModelRunner
from sightline.inference.torch_engine.request import TorchCounters, TorchRequest
from sightline.inference.torch_engine.row_table import RowTable
from sightline.inference.torch_engine.scheduler import Scheduler
from sightline.inference.torch_engine.step_plan import StepPlan, build_step_plan
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams
from sightline.wire.weights import Manifest


@dataclass(slots=True)
class _WeightSwap:
    manifest: Manifest
    tensors: dict[str, Tensor]
    done: Future[None]


class TorchEngine(Engine):
    """The methods without an underscore are for other threads."""

    request_class = TorchRequest
    counters: TorchCounters

    def __init__(
        self,
        forward: Forward,
        family: Family,
        materializer: Materializer,
        banned: tuple[int, ...],
        spec: ServerSpec,
        manifest: Manifest,
        base: AdapterBase,
    ) -> None:
        super().__init__(spec, materializer, TorchCounters())
        self._manifest = manifest
        self._base = base
        self._seeds = random.SystemRandom()
        self.features = FeatureCache(spec.inference.feature_cache_mb * MEBIBYTE)
        inference = spec.inference
        rows = RowTable(inference.max_num_seqs, inference.max_model_len, family.num_axes)
        carries_state = family.packing.carries_state
        kind = RecurrentModelRunner if carries_state else ModelRunner
        self.runner = kind(forward, family, self.features, rows, banned)
        self._event = threading.Event()
        self.scheduler = Scheduler(
            rows,
            family,
            materializer,
            self.features,
            self.counters,
            spec.enable_prefix_caching and not carries_state,
            self._event.set,
        )
        self._inbox: deque[TorchRequest] = deque()
        self._submitted_bytes = 0
        self._pending_swaps: deque[_WeightSwap] = deque()
        self._pending_cancels: deque[TorchRequest] = deque()
        # Reentrant: a signal may call `stop` in the middle of `submit`, on the same thread.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, deliver: Deliver) -> None:
        """`deliver` gets the requests that are done after each step, on the engine's thread."""
        self._deliver = deliver
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._event.set()

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        super().join(timeout_s)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + len(self.scheduler.waiting) + len(self.scheduler.loading)

    @property
    def waiting_bytes(self) -> int:
        return self._submitted_bytes - self.scheduler.started_bytes

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def _prepare_params(self, params: SamplingParams) -> SamplingParams:
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(64))
        if params.prompt_logprobs is not None:
            # Tokens that the KV cache holds are not computed, so they have no logprobs.
            params = msgspec.structs.replace(params, skip_reading_prefix_cache=True)
        return params

    def submit(self, requests: list[TorchRequest]) -> None:
        with self._lock:
            self._check_accepts(requests)
            for request in requests:
                request.waiting_bytes = request.nbytes
                self._submitted_bytes += request.waiting_bytes
            self._inbox.extend(requests)
        self._event.set()

    def cancel(self, request: TorchRequest) -> None:
        self._pending_cancels.append(request)
        self._event.set()

    def _read_update(self, folder: Path, manifest: Manifest) -> _WeightSwap:
        tensors = read_tensors(folder, manifest)
        return _WeightSwap(manifest, self._base.merge(manifest, tensors), Future())

    def _take_update(self, update: _WeightSwap) -> None:
        with self._lock:
            if self._is_stopping:
                raise stopping_error()
            self._pending_swaps.append(update)
        self._event.set()
        update.done.result()

    def totals(self) -> dict[str, float]:
        return {
            **super().totals(),
            "steps_replayed": self.runner.num_replayed,
            "images_encoded": self.features.encoded,
            "feature_cache_hits": self.features.hits,
            "feature_cache_evicted": self.features.evicted,
        }

    def now(self) -> dict[str, float]:
        return {
            **super().now(),
            "rows": self.scheduler.rows.num_rows,
            "rows_free": len(self.scheduler.rows.free),
            "rows_cached": len(self.scheduler.prefixes),
            "kv_bytes": self.runner.nbytes,
            "feature_cache_bytes": self.features.bytes_held,
        }

    # --- the loop

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            # Nothing can be computed any more (a device error that sticks, say), and requests
            # would wait for ever: the process ends, and whoever watches it learns why.
            traceback.print_exc()
            self.on_fatal_error()

    def _loop(self) -> None:
        torch.set_num_threads(self._spec.num_threads)
        with torch.inference_mode():
            while not self._is_stopping:
                self._event.clear()
                began = time.time()
                try:
                    has_worked = self._run_once()
                except Exception as error:  # a bug, or a full device, costs what was running
                    self._fail(list(self.scheduler.running.values()), to_engine_error(error))
                    has_worked = True
                self._deliver_done()
                if has_worked:
                    self.busy.add(began)
                else:
                    self._event.wait()
        self._refuse_unfinished()

    def _run_once(self) -> bool:
        """One turn of the loop; False when no row could compute."""
        scheduler = self.scheduler
        while self._inbox:
            scheduler.add(self._inbox.popleft())
        while self._pending_swaps:
            self._apply_swap(self._pending_swaps.popleft())
        while self._pending_cancels:
            scheduler.abort(self._pending_cancels.popleft())
        scheduler.admit()
        scheduler.start_loaded()
        active = scheduler.active()
        if not len(active):
            return False
        table = scheduler.rows
        self._step(
            build_step_plan(
                active, table.length, table.computed, self._spec.inference.prefill_chunk_tokens
            )
        )
        return True

    def _step(self, plan: StepPlan) -> None:
        table, running = self.scheduler.rows, self.scheduler.running
        hidden = self.runner.hidden(plan, running)
        self.runner.score_prompts(plan, hidden, running)
        is_prompt = plan.starts < table.prompt_length[plan.rows]
        table.computed[plan.rows] = plan.ends
        self.counters.steps += 1
        self.counters.computed_tokens += int(plan.counts[is_prompt].sum())
        if not plan.samples.any():
            return
        rows = plan.rows[plan.samples]
        tokens, logprobs = self.runner.sample(plan, hidden)
        is_stopped = table.append(rows, tokens, logprobs)
        self.counters.sampled_tokens += len(rows)
        self.counters.tokens_on_old_kv += int(table.has_stale_kv[rows].sum())
        for row in plan.rows[is_prompt & plan.samples].tolist():
            running[row].features.clear()
            running[row].timeline.end("prefill")
        is_broken = ~np.isfinite(logprobs)
        if is_broken.any():
            self._fail([running[row] for row in rows[is_broken].tolist()], not_finite_error())
        is_ended = (is_stopped | (table.length[rows] >= table.limit[rows])) & ~is_broken
        label = self.manifest.label
        for i in np.flatnonzero(is_ended).tolist():
            reason = "stop" if is_stopped[i] else "length"
            self.scheduler.finish(running[int(rows[i])], reason, label)

    def _fail(self, requests: list[TorchRequest], error: EngineError) -> None:
        for request in requests:
            self.runner.kv.zero_row(request.row)
            self.scheduler.fail(request, error)

    def _deliver_done(self) -> None:
        if self.scheduler.done:
            done, self.scheduler.done = self.scheduler.done, []
            self._deliver(done)

    def _apply_swap(self, swap: _WeightSwap) -> None:
        old, new = self.manifest, swap.manifest
        try:
            is_vision_new = (
                old.vision_version != new.vision_version or not self._is_vision_unchanged(swap)
            )
            adopt_into(self.runner.forward.model, swap.tensors)
        except Exception as error:  # the caller hears of it, the weights stay
            swap.done.set_exception(error)
            return
        self._manifest = new
        self.counters.adopted += 1
        if is_vision_new:
            self.features.clear()
        self.scheduler.invalidate_after_update(
            old.label, self._spec.inference.keep_kv_over_updates, is_vision_new
        )
        swap.done.set_result(None)

    def _is_vision_unchanged(self, swap: _WeightSwap) -> bool:
        """Whether the vision tower of `swap` is bit for bit the one in use.

        A vision version that was made again under another epoch has the same number.
        """
        own = self.runner.forward.vision_parameters()
        return all(
            name in swap.tensors
            and swap.tensors[name].shape == parameter.shape
            and torch.equal(parameter, swap.tensors[name].to(parameter))
            for name, parameter in own
        )

    def _refuse_unfinished(self) -> None:
        with self._lock:  # a submission that saw no end coming is in the inbox by now
            scheduler = self.scheduler
            unfinished = [*scheduler.running.values(), *scheduler.loading, *scheduler.waiting]
            for request in [*unfinished, *self._inbox]:
                scheduler.fail(request, stopping_error())
            for swap in self._pending_swaps:
                swap.done.set_exception(stopping_error())
        self._deliver_done()
        self.runner.close()


def build_engine(
    spec: ServerSpec, family: Family, materializer: Materializer, banned: tuple[int, ...]
) -> TorchEngine:
    """The engine of a server's spec, its model loaded."""
    torch.set_num_threads(spec.num_threads)
    device, dtype = pick_device(spec.inference.device), spec.model.dtype
    forward = load_model(spec.model.path, family, device, dtype)

    def read_base() -> dict[str, Tensor]:
        loaded = load_model(spec.model.path, family, "cpu", dtype)
        return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}

    base = AdapterBase(read_base)
    manifest = Manifest(version=0, vision_version=0, files=[], run=spec.run_id)
    if spec.weights is not None:
        manifest, tensors = read_weights(spec.weights)
        adopt_into(forward.model, base.merge(manifest, tensors))
    return TorchEngine(forward, family, materializer, banned, spec, manifest, base)
