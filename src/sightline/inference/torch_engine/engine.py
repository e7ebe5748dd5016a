"""The loop of the embedded engine, which runs on its own thread.

    submit --> inbox --> waiting --a row--> loading --pixels--> running --> done --> deliver
    adopt  --> swaps     between two steps
    cancel --> cancels   between two steps

Each turn of the loop schedules a step, executes it and updates the rows. A step is one forward
pass: the next token of every row that decodes and, within a budget, chunks of prompts. On a GPU the
host runs one step ahead: it launches the next step, then updates with the tokens of the last one. A
row that has ended in the meantime computes one extra token, which is dropped.

Waits for: a submission, an update, a cancellation or pixels, and only when no row can compute.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from sightline.compute.feature_cache import FeatureCache
from sightline.compute.weight_transport import WeightReceiver
from sightline.errors import ConfigError, EngineError
from sightline.families import Family, Forward
from sightline.inference.engine import Deliver, Engine
from sightline.inference.errors import (
    build_engine_error,
    not_finite_error,
    stopping_error,
    to_engine_error,
)
from sightline.inference.server_spec import MEBIBYTE, ServerSpec
from sightline.inference.torch_engine.model_runner import Drawn, ModelRunner, WholeRowRunner
from sightline.inference.torch_engine.observer import EngineObserver, TorchCounters
from sightline.inference.torch_engine.policy_weights import PolicyWeights
from sightline.inference.torch_engine.recurrent_runner import RecurrentModelRunner
from sightline.inference.torch_engine.row_table import (
    RowTable,
    StepPlan,
    TorchRequest,
    build_step_plan,
)
from sightline.inference.torch_engine.scheduler import Scheduler
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams
from sightline.wire.weights import Manifest


@dataclass(slots=True)
class _WeightSwap:
    manifest: Manifest
    tensors: dict[str, Tensor]
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step and the destination of its samples."""

    drawn: list[Drawn]
    rows: np.ndarray
    at: np.ndarray
    """Positions of the sampled tokens in their rows."""
    requests: list[TorchRequest]
    is_first: np.ndarray
    """Mask of the rows that sample their first token."""
    num_keys: int
    """Keys that a pure decode step reads; 0 for other steps."""


class TorchEngine(Engine):
    """The embedded engine. Its public methods may be called from any thread."""

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
        weights: PolicyWeights,
        max_kv_bytes: int = 0,
    ) -> None:
        super().__init__(spec, materializer, TorchCounters())
        self._manifest = manifest
        self._weights = weights
        self._receiver = WeightReceiver()
        self._seeds = random.SystemRandom()
        self.features = FeatureCache(spec.inference.feature_cache_mb * MEBIBYTE)
        inference, exact = spec.inference, spec.model.exact
        try:
            rows = RowTable(inference.max_num_seqs, inference.max_model_len, family.num_axes)
        except MemoryError as error:
            problem = f"no memory for {inference.max_num_seqs} x {inference.max_model_len} tokens"
            raise ConfigError(problem, "lower max_model_len or max_num_seqs") from error
        kind = RecurrentModelRunner if family.packing.carries_state else ModelRunner
        kind = WholeRowRunner if family.packing.kind == "rows" else kind
        self.runner = kind(forward, family, self.features, rows, banned, exact, max_kv_bytes)
        self._event = threading.Event()
        self.observer = EngineObserver(self.busy, self.runner.take_vision_seconds, self.counters)
        self.scheduler = Scheduler(
            rows,
            family,
            materializer,
            self.features,
            self.counters,
            spec.enable_prefix_caching and kind.keeps_kv,
            self.runner.share_prefix,
            self._event.set,
            lambda lengths, rows: self.runner.kv.has_room(lengths, rows),
        )
        self._in_flight: _Step | None = None
        self._inbox: deque[TorchRequest] = deque()
        self._submitted_bytes = 0
        self._pending_swaps: deque[_WeightSwap] = deque()
        self._pending_cancels: deque[TorchRequest] = deque()
        # Reentrant: a signal handler may call `stop` during `submit`, on the same thread.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, deliver: Deliver) -> None:
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

    @property
    def step_s(self) -> float:
        return self.observer.step_s

    def _prepare_params(self, params: SamplingParams) -> SamplingParams:
        if params.reward != self.runner.gives_rewards:
            sampled = "the checkpoint is a reward model, which samples no text"
            problem = "the checkpoint has no reward head" if params.reward else sampled
            fix = "POST /v1/reward to a reward model, and other requests to a language model"
            raise build_engine_error("sampling", problem, fix)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(64))
        if params.prompt_logprobs is not None:
            # Cached tokens are not computed, so they would have no logprobs.
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

    @contextmanager
    def _open_update(self, folder: Path, manifest: Manifest) -> Iterator[_WeightSwap]:
        with self._receiver.open_tensors(folder, manifest) as tensors:
            yield _WeightSwap(manifest, self._weights.check(manifest.adapter, tensors), Future())

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
            # The engine cannot continue, for example after a device error. The process must end,
            # or requests would wait forever.
            traceback.print_exc()
            self.on_fatal_error()

    def _loop(self) -> None:
        torch.set_num_threads(self._spec.num_threads)
        with torch.inference_mode():
            while not self._is_stopping:
                self._event.clear()
                self.observer.on_turn_began()
                try:
                    has_worked = self._run_once()
                except Exception as error:  # a bug, or a full device, fails the running requests
                    self._in_flight = None
                    self._fail(list(self.scheduler.running.values()), to_engine_error(error))
                    has_worked = True
                self._deliver_done()
                self.observer.on_turn_ended(has_worked)
                if not has_worked:
                    self._event.wait()
        self._refuse_unfinished()

    def _run_once(self) -> bool:
        """Schedule, execute and update once. Return False if no row could compute."""
        plan = self._schedule()
        previous, self._in_flight = self._in_flight, None
        if plan is not None:
            self._in_flight = self._execute(plan)
        if previous is not None:
            self._update(previous)
        if self.runner.decoder is None:  # the next step needs these tokens on the host
            self._drain()
        return plan is not None or previous is not None

    def _schedule(self) -> StepPlan | None:
        """Apply submissions, weight swaps and cancellations, then plan the next step."""
        scheduler = self.scheduler
        while self._inbox:
            scheduler.add(self._inbox.popleft())
        while self._pending_swaps:
            self._drain()  # its tokens belong to the version that sampled them
            with self.observer.adopting():
                self._apply_swap(self._pending_swaps.popleft())
        while self._pending_cancels:
            scheduler.abort(self._pending_cancels.popleft())
        scheduler.admit()
        scheduler.start_loaded()
        table, running = scheduler.rows, scheduler.running
        active = np.fromiter(running, dtype=np.int64, count=len(running))
        if self._in_flight is not None:
            active = active[table.length[active] < table.limit[active]]
        if not len(active):
            return None
        chunk = self._spec.inference.prefill_chunk_tokens
        if not self.runner.keeps_kv:  # each chunk would recompute the ones before it
            chunk = table.max_model_len
        return build_step_plan(active, table.length, table.computed, chunk, table.pause)

    def _execute(self, plan: StepPlan) -> _Step | None:
        """Launch a step on the device. Return None if no row of it samples."""
        table, running = self.scheduler.rows, self.scheduler.running
        drawn = self.runner.step(plan, running)
        is_prompt = plan.starts < table.prompt_length[plan.rows]
        is_pure_decode = bool(drawn) and not is_prompt.any() and bool((plan.counts == 1).all())
        table.computed[plan.rows] = plan.ends
        self.observer.on_executed(plan, is_prompt, is_pure_decode)
        if not drawn:
            return None
        rows = np.concatenate([part.rows for part in drawn])
        first = plan.rows[is_prompt & plan.samples]
        requests = [running[row] for row in rows.tolist()]
        num_keys = int(plan.ends.sum()) if is_pure_decode else 0
        is_first = np.isin(rows, first) if len(first) else np.zeros(len(rows), dtype=bool)
        return _Step(drawn, rows, table.append(rows), requests, is_first, num_keys)

    def _update(self, step: _Step) -> None:
        """Store a step's sampled tokens in the rows that still have the same request."""
        table, running = self.scheduler.rows, self.scheduler.running
        parts = [part.read() for part in step.drawn]
        self.observer.on_collected(len(step.rows), step.num_keys)
        tokens, logprobs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        rows, at, is_first = step.rows, step.at, step.is_first
        pairs = zip(rows.tolist(), step.requests, strict=True)
        is_live = np.array([running.get(row) is request for row, request in pairs], dtype=bool)
        if not is_live.all():
            kept = (x[is_live] for x in (rows, at, tokens, logprobs, is_first))
            rows, at, tokens, logprobs, is_first = kept
        is_stopped = table.put(rows, at, tokens, logprobs)
        self.counters.sampled_tokens += len(rows)
        if self.runner.keeps_kv:
            for row in rows[is_first].tolist():
                running[row].features.clear()
        is_broken = ~np.isfinite(logprobs)
        if is_broken.any():
            self._fail([running[row] for row in rows[is_broken].tolist()], not_finite_error())
        is_ended = (is_stopped | (at + 1 >= table.limit[rows])) & ~is_broken
        label = self.manifest.label
        for i in np.flatnonzero(is_ended).tolist():
            reason, row = "stop" if is_stopped[i] else "length", int(rows[i])
            table.length[row] = at[i] + 1  # drop the token of a step launched since
            first = running[row].params.routes_from
            if first is not None and self.runner.routing is not None:
                running[row].routes = self.runner.kv.get_routes(row, first, int(at[i]))
            self.scheduler.finish(running[row], reason, label)

    def _drain(self) -> None:
        """Store the sampled tokens of the step in flight, if any."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._update(step)

    def _fail(self, requests: list[TorchRequest], error: EngineError) -> None:
        for request in requests:
            self.scheduler.fail(request, error)

    def _deliver_done(self) -> None:
        if self.scheduler.done:
            done, self.scheduler.done = self.scheduler.done, []
            self._deliver(done)

    def _apply_swap(self, swap: _WeightSwap) -> None:
        old, new = self.manifest, swap.manifest
        seeing = [name for name, _ in self.runner.forward.vision_parameters()]
        # A version that is computed again may have the same number and other bits.
        has_new_number = old.vision_version != new.vision_version
        try:
            before = "" if has_new_number else self._weights.digest(seeing)
            if self._weights.adopt(new.adapter, swap.tensors) and self.runner.decoder is not None:
                self.runner.decoder.drop_graphs()
            is_vision_new = has_new_number or self._weights.digest(seeing) != before
        except Exception as error:  # goes to the caller; the weights do not change
            swap.done.set_exception(error)
            return
        self._manifest = new
        self.counters.adopted += 1
        if is_vision_new:
            self.features.clear()
        keep_kv = self._spec.inference.keep_kv_over_updates and self.runner.keeps_kv
        self.scheduler.invalidate_after_update(old.label, keep_kv, is_vision_new)
        swap.done.set_result(None)

    def _refuse_unfinished(self) -> None:
        with self._lock:  # a submission that came before the stop is in the inbox by now
            scheduler = self.scheduler
            unfinished = [*scheduler.running.values(), *scheduler.loading, *scheduler.waiting]
            for request in [*unfinished, *self._inbox]:
                scheduler.fail(request, stopping_error())
            for swap in self._pending_swaps:
                swap.done.set_exception(stopping_error())
        self._deliver_done()
        self.runner.close()
