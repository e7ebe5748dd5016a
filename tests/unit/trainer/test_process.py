"""Root cause of a failed trainer: the one error, among those of all ranks, that caused the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist

from sightline.config import RunFile
from sightline.errors import ProcessFailed
from sightline.launch.processes import reserve_port
from sightline.run import RunDir
from sightline.run.mirror import COPIED
from sightline.trainer import process
from sightline.trainer.process import find_cause, is_broken_collective
from sightline.trainer.ranks import RankInfo
from sightline.trainer.watchdog import BackgroundTask
from sightline.transport.zmq_channel import Hub, Spoke, derive_spoke_key
from sightline.wire import control


def fail() -> None:
    raise OSError("no room")


def test_background_failure_is_reported_as_the_loops_cause() -> None:
    tasks = [BackgroundTask("checkpoint"), BackgroundTask("publish")]
    components: Any = SimpleNamespace(run_writer=SimpleNamespace(background_tasks=tasks))
    broken = RuntimeError("a collective broke")
    assert find_cause(broken, components) is broken and find_cause(broken, None) is broken
    tasks[1].start("publishing", fail)
    with pytest.raises(OSError, match="no room"):
        tasks[1].wait()
    assert str(find_cause(broken, components)) == "no room"


def test_collective_error_from_a_lost_rank_is_not_reported_as_a_fault() -> None:
    store, kind = dist.HashStore(), cast(Any, dist.ProcessGroupGloo)
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        groups[rank] = kind(store, rank, 2, options)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))
    del groups[1]  # as the end of its process does
    with pytest.raises(RuntimeError) as raised:
        groups[0].barrier().wait()
    assert is_broken_collective(raised.value), str(raised.value)
    assert not is_broken_collective(RuntimeError("a fault in the forward pass"))
    assert not is_broken_collective(torch.OutOfMemoryError("CUDA out of memory"))


def test_trainer_with_an_undelivered_last_message_has_failed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator waits for the trainer. With an exit status of 0, the run would never end."""
    monkeypatch.setattr(process, "MAX_SILENCE_S", 0.1)
    run_dir, address = RunDir(tmp_path), f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"
    run_dir.make()
    config = RunFile.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "env": {"name": "color_codeword"},
            "trainer": {"device": "cpu", "stall_timeout_s": 0},
        }
    )
    hub = Hub(address, "s")

    def cut_off_after_the_start() -> None:
        message = hub.receive(100.0)
        assert message is not None and isinstance(control.decode(message[1]), control.ProcessReady)
        hub.send("trainer", control.encode(control.FinishTraining(0)))
        assert hub.close(100.0)

    train = process.loop.run

    def train_when_nobody_hears(components: Any) -> None:
        cut.result(100.0)
        train(components)

    monkeypatch.setattr(process.loop, "run", train_when_nobody_hears)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(cut_off_after_the_start)
        with pytest.raises(ProcessFailed, match="has not acknowledged the trainer's last messages"):
            ranks = RankInfo(hub_key=derive_spoke_key("s", "trainer"))
            process.run(config, run_dir, ranks, "trainer", address)


def test_weights_do_not_wait_for_checkpoints_and_batches_are_kept_until_sent(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path / "copy")
    run_dir.make()
    (run_dir.path / COPIED).touch()
    address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
    hub, key = Hub(address, "secret"), derive_spoke_key("secret", "trainer")
    spoke = Spoke(address, "trainer", key)
    media = {"root": str(tmp_path / "images")}
    config = RunFile.model_validate(
        {"model": {"path": "m"}, "env": {"name": "color_codeword"}, "media": media}
    )

    def hear() -> control.ControlMessage:
        message = hub.receive(60.0)
        assert message is not None
        return control.decode_from("trainer", message[1])

    try:
        orchestrator = process._connect(spoke, config, run_dir)
        folder = run_dir.checkpoints / "step_000002"
        folder.mkdir()
        (folder / "manifest.json").write_bytes(b"{}")
        weights = control.PublishedWeights(3, 0, "weights/v000003/manifest.json", {}, 2)
        orchestrator.send(weights)
        assert hear() == control.PublishedWeights(3, 0, weights.manifest, {}, 0)
        orchestrator.send_checkpoints()
        orchestrator.send(weights)
        sent = hear()
        assert isinstance(sent, control.FileChanges)
        assert [file.name for file in sent.files] == ["checkpoints/step_000002/manifest.json"]
        assert hear() == weights
    finally:
        spoke.close()
        hub.close()
