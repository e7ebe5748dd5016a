"""A resumed run equals an uninterrupted one: bit-equal weights, and every step once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import making
import msgspec
import pytest

from sightline.config import RunFile
from sightline.errors import PolicyMismatch, ResumeRefused
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trainer import loop
from sightline.trainer.build import Orchestrator, build
from sightline.trainer.checkpoint import Ledger
from sightline.wire.control import BatchReady, ControlMessage, PublishedWeights, TrainingFinished
from sightline.wire.sample import Batch, digest_batch

STEPS = 5


class Killed(Exception):
    pass


def run_file(model: Path, max_mismatch: float | None = 0, **trainer: object) -> RunFile:
    """Samples and their logprobs are random, so the mismatch limit is off."""
    return RunFile.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"name": "color_codeword"},
            "run": {"steps": STEPS},
            "orchestrator": {"max_mismatch": max_mismatch},
            "trainer": {
                "device": "cpu",
                "lr": 1e-3,
                "checkpoint_every": 2,
                "stall_timeout_s": 0,  # what watches would outlive the test
                **trainer,
            },
        }
    )


def write_batches(run_dir: RunDir, model: Path) -> list[BatchReady]:
    store = MediaStore(run_dir.media)
    announced = []
    for step in range(1, STEPS + 1):
        samples = making.samples(model, store, count=5, seed=step, version=step - 1)
        data = Batch(step, samples).to_bytes()
        run_dir.batch(step).write_bytes(data)
        announced.append(BatchReady(step, digest_batch(data), data))
    return announced


def train(
    config: RunFile,
    run_dir: RunDir,
    batches: list[BatchReady],
    die_after: int | None = None,
    after: int | None = None,
) -> list[ControlMessage]:
    """Run the trainer once.

    It dies after it has published `die_after`. It receives the batches `after` its checkpoint, by
    default the newest.
    """
    sent: list[ControlMessage] = []

    def send(message: ControlMessage) -> None:
        sent.append(message)
        if isinstance(message, PublishedWeights) and message.version == die_after:
            raise Killed

    def announcements() -> Iterator[BatchReady | None]:
        yield from [batch for batch in batches if batch.step > first[0]]
        yield None

    first = [0]
    source: list[Iterator[BatchReady | None]] = []

    def next_announcement() -> BatchReady | None:
        if not source:
            first[0] = _checkpoint_step(run_dir) if after is None else after
            source.append(announcements())
        return next(source[0])

    parts = build(config, run_dir, Orchestrator(next_announcement, send))
    try:
        loop.run(parts)
    except Killed:
        parts.run_writer.saver.background_task.wait()
    return sent


def _checkpoint_step(run_dir: RunDir) -> int:
    paths = sorted(run_dir.checkpoints.glob("step_*"))
    return int(paths[-1].name.removeprefix("step_")) if paths else 0


def weights_digest(run_dir: RunDir, version: int) -> str:
    folder = run_dir.weights / f"v{version:06d}"
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    new_run_dir = RunDir(tmp_path / "run")
    new_run_dir.make()
    return new_run_dir


@pytest.mark.parametrize(("updates", "dtype"), [(1, "float32"), (2, "float32"), (1, "bfloat16")])
def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    tiny_model: Path, run_dir: RunDir, tmp_path: Path, updates: int, dtype: str
) -> None:
    """`updates` epochs, and as many minibatches: a resumed run replays whole steps."""
    config = run_file(tiny_model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    algorithm = config.algorithm.model_copy(update={"epochs": updates, "minibatches": updates})
    config = config.model_copy(update={"algorithm": algorithm})
    batches = write_batches(run_dir, tiny_model)
    train(config, run_dir, batches)
    whole = [weights_digest(run_dir, version) for version in range(1, STEPS + 1)]

    other = RunDir(tmp_path / "other")
    other.make()
    again = write_batches(other, tiny_model)
    for die_after in (1, 3, 4):
        train(config, other, again, die_after)
    sent = train(config, other, again)
    assert isinstance(sent[-1], TrainingFinished) and sent[-1].step == STEPS
    assert [weights_digest(other, version) for version in range(1, STEPS + 1)] == whole
    assert not list(other.weights.glob("*.1")), "a version made again has the same bits"
    ledger = [msgspec.json.decode(line) for line in other.ledger.read_bytes().splitlines()]
    assert [(line["step"], line["batch"]) for line in ledger] == [
        (batch.step, batch.digest) for batch in again
    ]


def test_step_with_a_different_sampler_policy_is_discarded(
    tiny_model: Path, run_dir: RunDir
) -> None:
    batches = write_batches(run_dir, tiny_model)
    config = run_file(tiny_model, None)
    differ = r"step 1: sampler and trainer differ by a KL of .*\. The limit is 1e-06"
    with pytest.raises(PolicyMismatch, match=differ) as raised:
        train(config, run_dir, batches)
    assert "suspect the server" in raised.value.fix
    assert not list(run_dir.weights.glob("v*")) and not list(run_dir.checkpoints.glob("step_*"))
    assert not run_dir.ledger.exists() or not run_dir.ledger.read_bytes()
    assert run_dir.scores_of(1).is_file(), "the dashboard shows where they differ"


def test_a_frozen_tower_keeps_its_weights_and_its_version(
    tiny_model: Path, run_dir: RunDir
) -> None:
    from safetensors.torch import load_file

    from sightline.wire.weights import read_manifest

    config = run_file(tiny_model)
    frozen = config.model_copy(
        update={"model": config.model.model_copy(update={"train_vision": False})}
    )
    train(frozen, run_dir, write_batches(run_dir, tiny_model))
    folder = run_dir.weights / f"v{STEPS:06d}"
    before, after = (
        load_file(tiny_model / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed and not any("visual" in name for name in changed)
    assert read_manifest(folder / "manifest.json").vision_version == 0
    trained = RunDir(run_dir.path.with_name("trained"))
    trained.make()
    train(config, trained, write_batches(trained, tiny_model)[:1])
    path = trained.weights / "v000001" / "manifest.json"
    assert read_manifest(path).vision_version == 1, "an engine's cached features are outdated"


def test_batches_are_kept_until_a_checkpoint_covers_them(tiny_model: Path, run_dir: RunDir) -> None:
    """The run stops after step 3. If its last checkpoint is damaged, it resumes from step 2."""
    sent = train(run_file(tiny_model), run_dir, write_batches(run_dir, tiny_model)[:3])
    published = [message for message in sent if isinstance(message, PublishedWeights)]
    assert [message.version for message in published] == [1, 2, 3]
    assert all(message.checkpoint_step == 0 for message in published)
    assert _checkpoint_step(run_dir) == 3 and sent[-1] == TrainingFinished(2)


def test_a_replay_on_another_batch_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", 0)
    ledger.add(1, "a" * 64)
    again = Ledger(tmp_path / "ledger.jsonl", 0)
    with pytest.raises(ResumeRefused, match="step 1 was trained on batch aaaa"):
        again.add(1, "b" * 64)


def test_a_ledger_with_a_gap_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl", 0).add(1, "a" * 64)
    with pytest.raises(ResumeRefused, match="every step"):
        Ledger(tmp_path / "ledger.jsonl", 3)
