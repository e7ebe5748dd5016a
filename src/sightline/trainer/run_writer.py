"""Writes the trainer's results in an order that survives a kill at any moment.

Every rank of `rl` and `sft` has a writer and calls the same methods in the same order, because
gathering weights is a collective. Rank 0 writes files and events. The others send their shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from sightline.compute.model import MODEL_DTYPES
from sightline.compute.weight_transport import WeightPublisher
from sightline.config import RunFile, SftFile
from sightline.errors import PolicyMismatch
from sightline.run import EventLog, RunDir
from sightline.trainer.blocks import end_compile_workers
from sightline.trainer.checkpoint import CheckpointSaver, Ledger
from sightline.trainer.export import export_checkpoint, gather_for_export
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.lora import Selected, gather_for_lead, select_published
from sightline.trainer.packing_check import describe_suspect
from sightline.trainer.step_result import StepResult
from sightline.trainer.watchdog import BackgroundTask
from sightline.wire.control import ControlMessage, PublishedWeights, TrainingFinished
from sightline.wire.file import check_disk_room, write_atomic
from sightline.wire.weights import Adapter, Manifest

Metrics = Mapping[str, float | None]
_SFT_METRICS = (
    "loss", "lr", "vision_lr", "grad_norm", "tokens", "trained_tokens", "samples", "images",
    "compilations", "kl_ref", "dpo_loss", "preference_accuracy",
)  # fmt: skip


@dataclass
class RunWriter:
    """Writes checkpoints, the exported model and, in `rl`, every version."""

    config: RunFile | SftFile
    run_dir: RunDir
    learner: Learner
    saver: CheckpointSaver
    events: EventLog | None = None
    """Receives the metrics; None on ranks other than 0."""
    adapter: Adapter | None = None
    """The base of LoRA adapters, if they are published unmerged."""
    ledger: Ledger | None = None
    """Lists the batch of every step. Only on rank 0 of `rl`."""
    async_publisher: AsyncPublisher | None = None
    """Writes or sends versions in a thread. Only on rank 0 of `rl`."""
    send: Callable[[ControlMessage], None] | None = None
    """Sends messages to the orchestrator; on rank 0 of `rl`."""
    _recent_s: list[float] = field(default_factory=list)
    """Durations of the last steps, for the time left."""
    _nll: float = 0.0
    _num_tokens: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of published and exported weights."""
        return MODEL_DTYPES[self.config.model.dtype]

    @property
    def background_tasks(self) -> list[BackgroundTask]:
        """Return the tasks that write in threads."""
        publishes = [] if self.async_publisher is None else [self.async_publisher.background_task]
        return [self.saver.background_task, *publishes]

    def check(self) -> None:
        """Raise the publisher thread's error or, in `sft`, if the disk is nearly full."""
        if self.async_publisher is not None:
            self.async_publisher.background_task.check()
        elif self.events is not None:  # in `rl` the orchestrator checks the disk
            check_disk_room(self.run_dir.path)

    def record(self, ready: ReadyBatch, result: StepResult) -> None:
        """Record the step's batch and scores before its weights are published.

        Raise if the mismatch is too high: the step is then neither published nor kept.
        """
        if self.ledger is not None and isinstance(self.config, RunFile):
            write_atomic(self.run_dir.scores_of(ready.step), result.scores.to_bytes())
            kl, limit = result.metrics["mismatch_kl"], self.config.mismatch_limit
            if limit and kl is not None and not kl <= limit:
                raise PolicyMismatch(
                    f"step {ready.step}: sampler and trainer differ by a KL of {kl:.3g} per token "
                    f"over {result.metrics['fresh_tokens']:.0f} tokens of version "
                    f"{ready.step - 1}. The limit is {limit:g}",
                    "the step was neither published nor kept. `sightline view` shows the mismatch "
                    f"by image and turn. {describe_suspect(ready, self.learner, limit)}. If this "
                    "difference is expected, resume with a higher [orchestrator] max_mismatch",
                )
            self.ledger.add(ready.step, ready.digest)

    def publish(self, step: int, metrics: Metrics) -> None:
        """Start publishing version `step`. Return when the weights may change again.

        Wait until the previous version is published and this one is copied to the host.
        """
        if isinstance(self.config, SftFile):  # it only exports at the end
            return
        selected = select_published(self.learner.forward.model, self.adapter, self.dtype)
        if self.async_publisher is None:
            gather_for_lead(*selected[:2])
            return

        def tell(path: Path, manifest: Manifest) -> None:
            assert self.send is not None
            oldest = self.saver.checkpoints.oldest_resume_step
            where = str(path.relative_to(self.run_dir.path))
            self.send(PublishedWeights(step, manifest.epoch, where, dict(metrics), oldest))

        vision_version = step if self.saver.train_vision else 0
        self.async_publisher.put(selected, step, vision_version, tell)

    def checkpoint(self, step: int, last: bool = False) -> None:
        """Start a checkpoint if one is due. `finish` waits for the last one."""
        self.saver.save(step, self.learner.forward.model, self.learner.optimizer, last)

    def report(
        self, ready: ReadyBatch, result: StepResult, busy: tuple[float, float], publish_s: float
    ) -> None:
        """Write the metrics of a step. `busy` is its start and end, in seconds since 1970."""
        if self.events is None:
            return
        if isinstance(self.config, RunFile):
            kind, figures = "train", self._rl_figures(ready, result, busy, publish_s)
        else:
            kind, figures = "sft", {k: v for k, v in result.metrics.items() if k in _SFT_METRICS}
            seconds = busy[1] - busy[0]
            self._recent_s = [*self._recent_s[-19:], seconds + ready.waited_s]
            mean_s = sum(self._recent_s) / len(self._recent_s)
            figures |= {"seconds": seconds, "waited_s": ready.waited_s}
            figures |= {"steps_total": self.learner.steps}
            figures |= {"eta_s": (self.learner.steps - ready.step) * mean_s}
        figures["gpu_peak_gb"] = None
        if self.learner.device.type == "cuda":
            figures["gpu_peak_gb"] = torch.cuda.max_memory_allocated(self.learner.device) / 1e9
            torch.cuda.reset_peak_memory_stats(self.learner.device)
        self.events.write(kind, ready.step, **figures, bad=ready.bad, truncated=ready.truncated)
        for lost in ready.dropped:
            self.events.write("bad_media", ready.step, **asdict(lost))
        if (probe := result.probe) is not None:
            self.events.write(
                "probe",
                ready.step,
                **asdict(probe),
                is_blind=probe.is_blind,
                is_weak=probe.is_weak,
                words=probe.words,
            )

    def _rl_figures(
        self, ready: ReadyBatch, result: StepResult, busy: tuple[float, float], publish_s: float
    ) -> dict[str, Any]:
        assert self.async_publisher is not None and self.learner.pixels is not None
        return {
            **result.metrics,
            "publish_s": self.async_publisher.previous_s,
            "seconds": {
                "wait": ready.waited_s,
                "materialize": ready.materialize_s,
                **result.step_timer.seconds(),
                "publish": publish_s,
            },
            "busy": list(busy),
            "pixels": asdict(self.learner.pixels),
            "caches": result.caches,
        }

    def report_evaluation(self, ready: ReadyBatch, nll: float, num_tokens: float) -> None:
        """Add a held-out batch. After the last one, write the mean loss over all of them."""
        if self.events is None:
            return
        self._nll, self._num_tokens = self._nll + nll, self._num_tokens + num_tokens
        if ready.is_last:
            loss = self._nll / self._num_tokens if self._num_tokens else None
            self.events.write("sft_eval", ready.step, loss=loss, trained_tokens=self._num_tokens)
            self._nll = self._num_tokens = 0.0

    def finish(self, step: int) -> None:
        """Export the model after `step`, once every version is published."""
        if self.async_publisher is not None:
            self.async_publisher.background_task.wait()
        end_compile_workers()
        model, config = self.learner.forward.model, self.config
        target = self.run_dir.checkpoints / "final"
        if isinstance(config, SftFile):
            target = Path(config.sft.output_dir)
        try:  # while the last checkpoint is written: weights no longer change
            if step > 0 and self.learner.dims.is_lead:
                export_checkpoint(Path(config.model.path), target, model, self.dtype)
            elif step > 0:
                gather_for_export(model)
        finally:
            self.saver.background_task.wait()
        if self.send is not None:
            # A run that was stopped early may resume from an older checkpoint than the last.
            is_over = step >= self.learner.steps
            oldest = self.saver.checkpoints.oldest_resume_step
            self.send(TrainingFinished(step if is_over else oldest))


Announce = Callable[[Path, Manifest], None]


@dataclass
class AsyncPublisher:
    """Publishes versions in the background, one at a time. Only on rank 0."""

    publisher: WeightPublisher
    background_task: BackgroundTask
    draft: Manifest
    """The fields that the manifests of all versions share."""
    previous_s: float | None = None
    """Seconds that the version before the newest took to publish."""
    _last_s: float | None = None

    def put(self, selected: Selected, step: int, vision_version: int, tell: Announce) -> None:
        """Publish `selected` as version `step`; return when the weights may change again.

        A background thread calls `tell` when the manifest is on the disk.
        """
        self.background_task.wait()
        self.previous_s, began = self._last_s, time.monotonic()
        self.publisher.take(*selected)
        draft = replace(self.draft, version=step, vision_version=vision_version)
        work = partial(self._publish, draft, tell, began)
        self.background_task.start(f"publishing version {step}", work)

    def _publish(self, draft: Manifest, tell: Announce, began: float) -> None:
        path, manifest = self.publisher.write(draft)
        self._last_s = time.monotonic() - began
        tell(path, manifest)
        self.publisher.send(manifest)
