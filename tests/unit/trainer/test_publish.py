"""A version is published while the next step computes: exact bits, in order, errors raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from unit.trainer.test_resume import run_file, train, weights_digest, write_batches

from sightline.compute.tensor_file import HostCopy, write_tensors
from sightline.compute.weights import write_weights
from sightline.run import RunDir
from sightline.trainer import loop
from sightline.trainer.build import Orchestrator, build
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.step_result import StepResult
from sightline.trainer.watchdog import StallWatchdog
from sightline.view.events import by_step, read_events
from sightline.wire import control
from sightline.wire.control import BatchReady, ControlMessage
from sightline.wire.event import STEP_METRICS
from sightline.wire.weights import Manifest

PATIENCE_S = 60.0


@dataclass
class Late:
    """Writes a version only after the next step was taken."""

    write: Callable[[Manifest], tuple[Path, Manifest]]
    last: int
    taken: dict[int, threading.Event] = field(default_factory=dict)
    was_early: list[int] = field(default_factory=list)

    def event(self, step: int) -> threading.Event:
        return self.taken.setdefault(step, threading.Event())

    def __call__(self, draft: Manifest) -> tuple[Path, Manifest]:
        step = draft.version
        if step < self.last and not self.event(step + 1).wait(PATIENCE_S):
            self.was_early.append(step)
        return self.write(draft)


@dataclass
class Telling:
    """A learner that records its steps."""

    inner: Learner
    late: Late

    @property
    def watchdog(self) -> StallWatchdog:
        return self.inner.watchdog

    def step(self, ready: ReadyBatch) -> StepResult:
        stepped = self.inner.step(ready)
        self.late.event(ready.step).set()
        return stepped


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    new_run_dir = RunDir(tmp_path / "run")
    new_run_dir.make()
    return new_run_dir


def test_version_written_after_the_next_step_has_its_own_weights(
    tiny_model: Path, run_dir: RunDir, tmp_path: Path
) -> None:
    config = run_file(tiny_model)
    plain = RunDir(tmp_path / "plain")
    plain.make()
    train(config, plain, write_batches(plain, tiny_model))
    batches = write_batches(run_dir, tiny_model)
    steps = [batch.step for batch in batches]
    sent: list[ControlMessage] = []
    announced: Iterator[BatchReady | None] = iter([*batches, None])
    parts = build(config, run_dir, Orchestrator(lambda: next(announced), sent.append))
    publisher = parts.run_writer.async_publisher.publisher  # type: ignore[union-attr]
    late = publisher.write = Late(publisher.write, last=steps[-1])
    parts.learner = Telling(parts.learner, late)  # type: ignore[arg-type]
    loop.run(parts)
    assert not late.was_early, "the next step has to begin before a version is written"
    versions = [
        message.version for message in sent if isinstance(message, control.PublishedWeights)
    ]
    assert versions == steps
    assert [weights_digest(run_dir, step) for step in steps] == [
        weights_digest(plain, step) for step in steps
    ]
    trained = by_step(read_events(run_dir.metrics), "train")
    assert trained[1].values["publish_s"] is None
    assert trained[1].values.keys() - STEP_METRICS == {"clip_fraction", "entropy"}, "GRPO's own"
    for step in steps[1:]:
        assert trained[step].values["publish_s"] > 0


def unwritable(draft: Manifest) -> tuple[Path, Manifest]:
    raise OSError("no space left on the device")


def test_failed_version_write_ends_a_waiting_loop(tiny_model: Path, run_dir: RunDir) -> None:
    # Synchronous training: the next batch arrives only after the version was adopted.
    batches = write_batches(run_dir, tiny_model)[:1]
    forever = threading.Event()

    def announcements() -> BatchReady | None:
        if not batches:
            forever.wait()
            return None
        return batches.pop(0)

    sent: list[ControlMessage] = []
    parts = build(run_file(tiny_model), run_dir, Orchestrator(announcements, sent.append))
    parts.run_writer.async_publisher.publisher.write = unwritable  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="no space left"):
        loop.run(parts)
    forever.set()
    assert not sent


def test_host_copy_equals_the_published_weights_and_reuses_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5), "count": torch.arange(3)}
    copy = HostCopy()
    copy.take(weights, dtype=torch.bfloat16)
    places = {name: tensor.data_ptr() for name, tensor in copy.tensors().items()}
    path, _ = write_weights(tmp_path / "copy", copy.tensors(), 1, 0)
    write_tensors(tmp_path / "same", weights, dtype=torch.bfloat16)
    written = path.with_name("model.safetensors").read_bytes()
    expected = (tmp_path / "same").read_bytes()
    assert len(written) == len(expected)
    tensors = {key: tensor.clone() for key, tensor in copy.tensors().items()}
    weights["a"].add_(1.0)
    assert copy.tensors()["a"].equal(tensors["a"]), "a copy does not follow the weights"
    copy.take(weights, dtype=torch.bfloat16)
    assert {name: tensor.data_ptr() for name, tensor in copy.tensors().items()} == places
    assert copy.tensors()["a"].equal(weights["a"].to(torch.bfloat16))
    assert copy.tensors()["count"].dtype == torch.int64
