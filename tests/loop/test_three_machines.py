"""A run on three machines without a shared folder, on an untrusted network.

It is slow, loses packets and gets split, and a server dies.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from shards import IS_FULL

from loop.jobs import EXAMPLES, Job, ledger, sightline, summary
from loop.network import Network, run_on
from sightline.families.registry import write_tiny
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]

STEPS = 10
CUT_OFF_S = 30.0
SHORT = """
[run]
steps = 10
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 6
[orchestrator]
groups_per_step = 2
group_size = 4
[trainer]
checkpoint_every = 2
[inference]
max_num_seqs = 16
max_model_len = 128
[eval]
tasks = 0
"""
TOKENS = {"MEDIA_TOKEN": "m" * 32, "SERVER_TOKEN": "s" * 32}


def test_run_on_three_machines_loses_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny("qwen_vl", tmp_path / "tiny", seed=0)
    run_dir = play(tmp_path, monkeypatch, tmp_path / "tiny", tomllib.loads(SHORT))
    assert [step for step, _ in ledger(run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.skipif(not IS_FULL, reason="the whole demo; run by `make full`")
def test_demo_learns_equally_on_three_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sightline("model", "tiny", "models/tiny", "--seed", "0", cwd=tmp_path)
    sightline("sft", EXAMPLES / "warmup.toml", cwd=tmp_path)
    settings = tomllib.loads((EXAMPLES / "cpu.toml").read_text())
    run_dir = play(tmp_path, monkeypatch, tmp_path / "models" / "warm", settings)
    steps = [step for step, _ in ledger(run_dir)]
    run_summary = summary(run_dir)
    print(
        f"{len(steps)} steps, reward {run_summary['reward_start']:.3f} to "
        f"{run_summary['reward_final']:.3f}"
    )
    assert steps == list(range(1, len(steps) + 1))
    assert run_summary["reward_start"] < 0.2 and run_summary["reward_final"] > 0.85


def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, settings: dict[str, Any]
) -> RunDir:
    """Run the run file `settings` on three machines with all faults."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    image.mkdir()
    shutil.copytree(model, disk / "model")
    shutil.copytree(model, image / "model")  # servers that somebody has started
    shutil.copy(Path(__file__).with_name("vowels.py"), image)
    path = os.pathsep.join([str(image), os.environ.get("PYTHONPATH", "")])
    for name, value in (TOKENS | {"PYTHONPATH": path}).items():
        monkeypatch.setenv(name, value)
    with Network("abc") as network, ExitStack() as stack:
        a, c = network.address("a"), network.address("c")
        here = [*network.enter("a"), sys.executable, "-m", "sightline"]
        inference = settings["inference"]

        def serve(port: int) -> subprocess.Popen[str]:
            words = [*network.enter("c", disk), sys.executable, "-m", "sightline", "serve"]
            words += [str(image / "model"), "--host", c, "--port", str(port)]
            words += ["--token", "env:SERVER_TOKEN", "--media", f"http://{a}:8100"]
            words += ["--media-token", "env:MEDIA_TOKEN", "--media-cache-dir", str(disk / "cache")]
            words += ["--max-model-len", str(inference["max_model_len"])]
            words += ["--max-num-seqs", str(inference["max_num_seqs"]), "--threads", "1"]
            log = tmp_path / f"server_{port}.log"
            process = stack.enter_context(run_on(words, log))
            wait_for_line(log, process)
            return process

        words = [*here, "media", "serve", str(disk / "images"), "--host", a, "--token"]
        media = stack.enter_context(run_on([*words, "env:MEDIA_TOKEN"], tmp_path / "media.log"))
        wait_for_line(tmp_path / "media.log", media)
        first, _ = serve(8001), serve(8002)
        media_service = {"root": f"http://{a}:8100", "token": "env:MEDIA_TOKEN"}
        servers = [f"http://{c}:8001", f"http://{c}:8002"]
        hosts = {"trainer": network.enter("b", disk), "worker-*": network.enter("c", disk)}
        elsewhere: dict[str, dict[str, Any]] = {
            "run": {"name": "job", "dir": str(disk / "runs")},
            "model": {"path": str(disk / "model")},
            "media": media_service | {"cache_dir": str(disk / "cache")},
            "rollout": {"workers": 1},
            "trainer": {"publish": "store"},
            "inference": {"servers": servers, "token": "env:SERVER_TOKEN"},
            "launch": {
                "address": a,
                "python": sys.executable,
                "scratch": str(disk / "scratch"),
                "hosts": {name: shlex.join(words) for name, words in hosts.items()},
            },
        }
        whole = {name: settings.get(name, {}) | keys for name, keys in elsewhere.items()}
        (tmp_path / "run.toml").write_text(tomli_w.dumps(settings | whole))
        network.latency_s, network.loss = 0.005, 0.005
        job = Job(disk, str(tmp_path / "run.toml"), within=network.enter("a"))
        stack.callback(job.process.kill)
        job.wait_for_step(2)
        until = time.monotonic() + CUT_OFF_S
        network.cut_off = {"b"}  # the trainer
        serve(8003)
        time.sleep(max(0.0, until - time.monotonic()))
        network.cut_off = set()
        job.wait_for_step(3)
        first.send_signal(signal.SIGKILL)
        added = f"http://{c}:8003"
        words = [*here, "servers", str(job.run_dir.path), "add", added]
        subprocess.run(words, check=True, capture_output=True, timeout=120)
        output = job.output(600.0)
        assert job.process.returncode == 0, output
        run_summary = summary(job.run_dir)
        assert run_summary["bad_media"] == 0 and run_summary["mismatch_kl"] < 1e-6
        assert added in job.run_dir.metrics.read_text() and network.num_lost > 0
        assert not job.run_dir.media.exists() and (job.run_dir.checkpoints / "final").is_dir()
        assert not list((disk / "scratch").glob("*"))
        assert not any((disk / "cache").rglob("weights-*"))
        return job.run_dir


def wait_for_line(log: Path, process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    """Return when the server prints that it is serving."""
    deadline = time.monotonic() + timeout_s
    while "serving" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
