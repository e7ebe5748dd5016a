"""Samples and weights of another policy end the run, on the real orchestrator."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sightline.compute.weights import write_weights
from sightline.config import RunFile
from sightline.errors import EngineError, SightlineError
from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.orchestrator.build import build, build_servers
from sightline.orchestrator.loop import Orchestrator
from sightline.orchestrator.run_state import RunState
from sightline.run import EventLog, RunDir
from sightline.trace import Node, PolicySpan, Trace, encode_trace
from sightline.trace.node import float32_array, int32_array
from sightline.wire.control import PublishedWeights, RolloutRequest, RolloutResult
from sightline.wire.generate import VersionSpan
from sightline.wire.weights import Manifest

SERVER = "http://127.0.0.1:9"


async def ignore(*args: Any) -> None:
    pass


def open_run(path: Path, announced: int = 3, servers: bool = False) -> Orchestrator:
    """The orchestrator of the run at `path`, as it is after a resume, with `announced` batches."""
    run_dir = RunDir(path)
    run_dir.make()
    values: dict[str, Any] = {"model": {"path": "model"}, "env": {"name": "color_codeword"}}
    values["inference"] = {"servers": [SERVER] * servers}
    run_state = RunState.open(run_dir)
    run_state.progress.step = announced
    config, store = RunFile.model_validate(values), MediaStore(run_dir.media)
    events = EventLog(run_dir.metrics, "orchestrator")
    pool = build_servers(config, run_dir, events, "secret", [SERVER])
    return build(config, run_dir, store, run_state, events, ignore, ignore, ["w"], pool, None)


@pytest.fixture
def run(tmp_path: Path) -> Orchestrator:
    return open_run(tmp_path / "run")


def run_id(run: Orchestrator) -> str:
    return (run.policy.weights.parent / "run_id").read_text()


def publish(run: Orchestrator, version: int, /, **changes: Any) -> tuple[Manifest, Any]:
    """Weights as the trainer writes them, and their announcement."""
    tensors = {"a": torch.full((3,), float(version))}
    weights, name = changes.pop("weights", run.policy.weights), changes.pop("run", run_id(run))
    path, manifest = write_weights(weights, tensors, version, 0, run=name)
    fields = {"version": version, "epoch": 0, "manifest": str(path), "metrics": {}}
    return manifest, PublishedWeights(**(fields | {"checkpoint_step": 0} | changes))


def answer(run: Orchestrator, label: str, **changes: Any) -> None:
    """Let a worker report a rollout that the weights `label` sampled."""
    request = RolloutRequest("g0.0", "g0", 0, "train", 0, 1.0)
    asyncio.run(run.rollouts.dispatcher.submit(request))
    span = PolicySpan.of(VersionSpan(label, 0, 1))
    nodes = [
        Node(0, -1, user("q"), int32_array([1, 2]), sampled_start=2),
        Node(
            1, 0, assistant("a"), int32_array([3, 4]), sampled_start=1,
            logprobs=float32_array([-1.0]), versions=(span,), finish_reason="stop",
        ),
    ]  # fmt: skip
    trace = Trace(id="g0.0", group_id="g0", nodes=nodes, **changes)
    run.rollouts.on_result(RolloutResult("g0.0", encode_trace(trace)))


def test_published_versions_are_accepted_before_and_after_a_resume(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    answer(run, Manifest(0, 0, [], run=run_id(run)).label)  # a server of its own, as it starts
    labels = []
    for version in (1, 2):
        manifest, message = publish(run, version)
        run.publish(message)
        answer(run, manifest.label)
        labels.append(manifest.label)
    resumed = open_run(tmp_path / "run")
    for label in labels:
        answer(resumed, label)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda label, run: "999999", "999999"),
        (lambda label, run: f"999999-{run}-{'0' * 16}", "did not publish"),
        (lambda label, run: label.replace(run, "beef"), "2-beef-"),
        (lambda label, run: label[:-16] + "0" * 16, "it published 2-"),
        (lambda label, run: label.replace("2-", "2.1-", 1), "2.1-"),
        (lambda label, run: "2", "'2'"),
        (lambda label, run: "0", "'0'"),
    ],
)
@pytest.mark.parametrize("servers", [False, True])
def test_answer_from_unpublished_weights_ends_the_run(
    tmp_path: Path, change: Any, said: str, servers: bool
) -> None:
    run = open_run(tmp_path / "run", servers=servers)
    manifest, message = publish(run, 2)
    run.publish(message)
    with pytest.raises(SightlineError, match="did not publish") as caught:
        answer(run, change(manifest.label, run_id(run)))
    assert said in str(caught.value)


def test_external_servers_hold_no_weights_of_the_run_before_adopting(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", servers=True)
    with pytest.raises(SightlineError, match="did not publish"):
        answer(run, Manifest(0, 0, [], run=run_id(run)).label)


def test_a_version_from_the_future_ends_the_run(run: Orchestrator) -> None:
    trace = Trace(id="r", reward=1.0, nodes=[
        Node(0, -1, user("q"), int32_array([1, 2]), sampled_start=2),
        Node(1, 0, assistant("a"), int32_array([3]), sampled_start=0,
             logprobs=float32_array([-1.0]), finish_reason="stop",
             versions=(PolicySpan(0, 1, version=7776, epoch=0),)),
    ])  # fmt: skip
    with pytest.raises(SightlineError, match="newer than version 3"):
        run.group_filter.decide([trace, trace], step=4)


def test_wrong_server_answer_ends_the_run(run: Orchestrator) -> None:
    label = Manifest(0, 0, [], run=run_id(run)).label
    with pytest.raises(EngineError, match=r"rollout g0.0: a logprob of 3") as caught:
        answer(run, label, error="a logprob of 3\n  fix: mend it", error_kind="wrong_answer")
    assert caught.value.fix == "mend it"


def forge_version(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 7776)[1]


def forge_old_version(run: Orchestrator, tmp: Path) -> Any:
    run.publish(publish(run, 2)[1])
    return publish(run, 1)[1]


def forge_skipped_version(run: Orchestrator, tmp: Path) -> Any:
    run.publish(publish(run, 1)[1])
    return publish(run, 3)[1]


def forge_repeated_version(run: Orchestrator, tmp: Path) -> Any:
    run.publish(publish(run, 2)[1])
    return publish(run, 2)[1]


def forge_negative_version(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 3, version=-1)[1]


def forge_checkpoint(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 3, checkpoint_step=10)[1]


def forge_place(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 3, weights=tmp / "elsewhere")[1]


def forge_link(run: Orchestrator, tmp: Path) -> Any:
    message = publish(run, 3, weights=tmp / "elsewhere")[1]
    (run.policy.weights / "v000003").symlink_to(Path(message.manifest).parent)
    return msgspec.structs.replace(
        message, manifest=str(run.policy.weights / "v000003" / "manifest.json")
    )


def forge_folder(run: Orchestrator, tmp: Path) -> Any:
    """A copy under the folder of versions, at a path where no version's manifest is."""
    message = publish(run, 3)[1]
    folder = run.policy.weights / "v000003" / "copy"
    shutil.copytree(Path(message.manifest).parent, folder)
    return msgspec.structs.replace(message, manifest=str(folder / "manifest.json"))


def forge_run(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 3, run="beef")[1]


def forge_epoch(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 3, epoch=1)[1]


def forge_digest(run: Orchestrator, tmp: Path) -> Any:
    manifest, message = publish(run, 3)
    forged = msgspec.structs.replace(manifest, weights_digest="0" * 64)
    Path(message.manifest).write_bytes(msgspec.json.encode(forged))
    return message


def forge_nothing(run: Orchestrator, tmp: Path) -> Any:
    return publish(run, 3, manifest=str(run.policy.weights / "v000009" / "manifest.json"))[1]


@pytest.mark.parametrize(
    "forge",
    [
        forge_version, forge_old_version, forge_skipped_version, forge_repeated_version,
        forge_negative_version, forge_checkpoint, forge_place, forge_link, forge_folder, forge_run,
        forge_epoch, forge_digest, forge_nothing,
    ],
)  # fmt: skip
def test_a_forged_message_of_published_weights_ends_the_run(
    run: Orchestrator, tmp_path: Path, forge: Any
) -> None:
    message = forge(run, tmp_path)
    before = run.policy.published
    with pytest.raises(SightlineError, match="a message falsely says that version"):
        run.publish(message)
    assert run.policy.published is before, "no engine is told of it"
