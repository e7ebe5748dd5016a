"""Evaluations during a run: each uses its own weights, none delays it, and the best is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.compute.lora_weights import write_merged
from sightline.compute.weights import write_weights
from sightline.families.registry import write_tiny
from sightline.media.stored_file import open_blobs
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.evaluator import BackgroundEvaluator
from sightline.orchestrator.policies import PolicyUpdater
from sightline.orchestrator.rollout_scheduler import RolloutDispatcher
from sightline.orchestrator.run_state import RunState
from sightline.run import EventLog, RunDir
from sightline.wire.control import ControlMessage, PublishedWeights, RolloutRequest
from sightline.wire.weights import Adapter

MEASURES = {2: 0.2, 4: 0.7, 6: 0.5, 8: 0.7}


class Asked:
    """An evaluator with its server's client, which records adopted versions and evaluations."""

    base_url = "http://evaluator"

    def __init__(self, run_state: RunState, events: EventLog) -> None:
        self.run_state, self.events = run_state, events
        self.adopted: list[str] = []
        self.evaluated: list[tuple[int, str, str]] = []
        self.gate = asyncio.Event()

    async def adopt(self, manifest: str) -> None:
        self.adopted.append(manifest)

    async def evaluate(self, name: str, step: int, server: str) -> float:
        await self.gate.wait()
        self.evaluated.append((step, "".join(self.adopted[-1:]), server))
        self.run_state.record_eval(name, step, MEASURES[step])
        return MEASURES[step]


def publish(run_dir: RunDir, step: int) -> PublishedWeights:
    tensors = {"a": torch.full((3,), float(step))}
    path, _ = write_weights(run_dir.weights, tensors, step, 0)
    return PublishedWeights(step, 0, str(path), {}, 0)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    new_run_dir = RunDir(tmp_path / "run")
    new_run_dir.make()
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    write_buffer = {"buffer": torch.arange(4.0), "a": torch.zeros(3)}
    save_file(write_buffer, source / "model.safetensors", metadata={"format": "pt"})
    return new_run_dir


def test_every_second_step_is_evaluated_and_the_best_is_kept(
    run_dir: RunDir,
) -> None:
    async def main() -> None:
        run_state = RunState.open(run_dir)
        events = EventLog(run_dir.metrics, "orchestrator")
        evaluations: Any = Asked(run_state, events)
        policy = PolicyUpdater(events, [], run_dir.weights, open_blobs(run_dir.media))
        target = run_dir.checkpoints / "best"
        best_checkpoint = BestCheckpoint(run_dir.path.parent / "source", target, run_state)
        background_evaluator = BackgroundEvaluator(
            evaluations,
            policy,
            best_checkpoint,
            evaluations.base_url,
            evaluations.adopt,
            every=2,
            last_step=9,
        )
        working = asyncio.create_task(background_evaluator.keep_evaluating())
        evaluations.gate.set()
        for step in range(1, 9):
            published = publish(run_dir, step)
            background_evaluator.publish(published)
            policy._remove_old_versions(step)
            # Nothing waited for it, so the next version may arrive at any time.
            if step % 2 == 0:
                assert (run_dir.weights / f"v{step:06d}").is_dir()
                await background_evaluator.drain()
                assert not policy.pinned_versions
        working.cancel()
        assert [step for step, _, _ in evaluations.evaluated] == [2, 4, 6, 8]
        for step, manifest, server in evaluations.evaluated:
            assert f"v{step:06d}" in manifest and server == evaluations.base_url
        assert (run_state.progress.best_step, run_state.progress.best_measure) == (4, 0.7)
        file = load_file(target / "model.safetensors")
        assert file["a"].tolist() == [4.0] * 3 and file["buffer"].tolist() == [0, 1, 2, 3]
        assert (target / "config.json").is_file()
        # Finished evaluations are not repeated, and a resumed run keeps its best checkpoint.
        assert RunState.open(run_dir).progress.best_step == 4
        background_evaluator.publish(publish(run_dir, 4))
        assert not policy.pinned_versions

    asyncio.run(main())


def test_final_weights_are_kept_only_if_they_are_those_that_were_evaluated(run_dir: RunDir) -> None:
    run_state, events = RunState.open(run_dir), EventLog(run_dir.metrics, "orchestrator")
    evaluations: Any = Asked(run_state, events)
    policy = PolicyUpdater(events, [], run_dir.weights, open_blobs(run_dir.media))
    best = BestCheckpoint(run_dir.path.parent / "source", run_dir.checkpoints / "best", run_state)
    background = BackgroundEvaluator(evaluations, policy, best, "", evaluations.adopt, 2, 9)
    run_state.record_eval("final", 8, 0.9)
    for published, kept in ((6, 0), (8, 8)):
        policy.publish(publish(run_dir, published))
        asyncio.run(background.keep_final_if_best(8))
        assert run_state.progress.best_step == kept
    assert load_file(best.target / "model.safetensors")["a"].tolist() == [8.0] * 3


def test_adapters_are_merged_into_the_best_checkpoint(run_dir: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "source"
    base = {"a.weight": torch.ones(2, 3), "head": torch.ones(2).bfloat16(), "b": torch.ones(2)}
    save_file(base, source / "model.safetensors", metadata={"format": "pt"})
    version = {
        "a.weight.lora_A": torch.tensor([[1.0, 2.0, 3.0]]),
        "a.weight.lora_B": torch.tensor([[1.0], [-1.0]]),
        "b": torch.full((2,), 5.0),
    }
    adapter = Adapter("", "F32", {"a.weight": 0.5})
    path, _ = write_weights(run_dir.weights, version, 2, 0, adapter)
    target, run_state = run_dir.checkpoints / "best", RunState.open(run_dir)
    best = BestCheckpoint(source, target, run_state)
    asyncio.run(best.keep_if_best(2, 0.5, path.parent))
    merged = load_file(target / "model.safetensors")
    assert merged["a.weight"].tolist() == [[1.5, 2.0, 2.5], [0.5, 0.0, -0.5]]
    assert merged["b"].tolist() == [5.0, 5.0] and merged["head"].equal(base["head"])
    assert not best.find_problem() and not (target / "adapter.safetensors").exists()


def test_slow_evaluation_keeps_its_own_version_and_frees_older_ones(run_dir: RunDir) -> None:
    async def main() -> None:
        run_state = RunState.open(run_dir)
        events = EventLog(run_dir.metrics, "orchestrator")
        evaluations: Any = Asked(run_state, events)
        policy = PolicyUpdater(events, [], run_dir.weights, open_blobs(run_dir.media))
        best_checkpoint = BestCheckpoint(
            run_dir.path.parent / "source", run_dir.checkpoints / "best", run_state
        )
        background_evaluator = BackgroundEvaluator(
            evaluations,
            policy,
            best_checkpoint,
            evaluations.base_url,
            evaluations.adopt,
            every=2,
            last_step=9,
        )
        working = asyncio.create_task(background_evaluator.keep_evaluating())
        for step in (2, 4, 6):
            background_evaluator.publish(publish(run_dir, step))
            await asyncio.sleep(0.01)
            policy._remove_old_versions(step)
        assert policy.pinned_versions == {2, 6}
        assert sorted(path.name for path in run_dir.weights.glob("v*")) == ["v000002", "v000006"]
        evaluations.gate.set()
        await background_evaluator.drain()
        working.cancel()
        assert [step for step, _, _ in evaluations.evaluated] == [
            2,
            6,
        ] and not policy.pinned_versions

    asyncio.run(main())
    skipped = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert [e["step"] for e in skipped if e["kind"] == "eval_skipped"] == [4]


def test_rollouts_on_another_server_do_not_use_the_runs_slots() -> None:
    sent: list[str] = []

    async def send(worker: str, message: ControlMessage) -> None:
        assert isinstance(message, RolloutRequest)
        sent.append(message.rollout_id)

    async def main() -> None:
        dispatcher = RolloutDispatcher(send, ["a"], max_in_flight=2)
        for i in range(3):
            await dispatcher.submit(RolloutRequest(f"t{i}", "g", i, "train", 0, 1.0))
        for i in range(4):
            await dispatcher.submit(
                RolloutRequest(f"e{i}", "", i, "eval", 0, 1.0, server="http://evaluator")
            )
        assert sent == ["t0", "t1", "e0", "e1", "e2", "e3"] and dispatcher.num_waiting == 1
        dispatcher.take_result("t0")
        await dispatcher._send_waiting()
        assert sent[-1] == "t2"

    asyncio.run(main())


def test_best_checkpoint_keeps_the_sources_expert_layout(tmp_path: Path) -> None:
    """Published weights store matrices transposed. transformers reads both forms."""
    from transformers import AutoModelForImageTextToText

    write_tiny("qwen_vl", tmp_path / "model", seed=0, type="qwen3_vl_moe", dtype="bfloat16")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", local_files_only=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    path, _ = write_weights(tmp_path / "weights", dict(model.named_parameters()), 3, 3)
    file = tmp_path / "model" / "model.safetensors"
    before = {name: tensor.shape for name, tensor in load_file(file).items()}
    weights = [path.with_name("model.safetensors")]
    write_merged(weights, None, [file], tmp_path / "merged.safetensors")
    (tmp_path / "merged.safetensors").replace(file)
    assert {name: tensor.shape for name, tensor in load_file(file).items()} == before
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", local_files_only=True)
    assert any(before[n] != p.shape for n, p in model.named_parameters())
    parameters = dict(again.named_parameters())
    assert all(torch.equal(parameters[n], parameter) for n, parameter in model.named_parameters())


def test_adapters_are_merged_in_the_precision_in_which_they_trained(tmp_path: Path) -> None:
    weight, head = torch.randn(8, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    a, b = torch.randn(2, 8) * 1e-2, torch.randn(8, 2) * 1e-2
    save_file({"x.weight": weight, "head.weight": head}, tmp_path / "base.safetensors")
    save_file({"x.weight.lora_A": a, "x.weight.lora_B": b}, tmp_path / "version.safetensors")
    paths = [tmp_path / "version.safetensors"], [tmp_path / "base.safetensors"]
    adapter = Adapter("", "F32", {"x.weight": 2.0})
    write_merged(paths[0], adapter, paths[1], tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    assert torch.equal(merged["x.weight"], weight.float() + 2.0 * (b @ a))
    assert torch.equal(merged["head.weight"], head)
