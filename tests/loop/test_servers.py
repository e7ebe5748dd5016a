"""A run on inference servers that were started separately."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loop.jobs import Job, ledger, sightline, summary
from sightline.families.registry import write_tiny
from sightline.launch.processes import temporary_server
from sightline.run import RunDir
from sightline.view.events import read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

STEPS = 3
TOKEN = "what the servers ask for"
RUN = f"""
[run]
name = "apart"
steps = {STEPS}
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[media]
root = "media"
[rollout]
max_tokens = 8
[orchestrator]
groups_per_step = 3
group_size = 4
[trainer]
lr = 2e-3
[eval]
tasks = 0
[inference]
max_model_len = 256
servers = SERVERS
token = "file:token"
"""


def ask(address: str, path: str) -> Any:
    request = urllib.request.Request(address + path, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in its own process, which may be killed."""
    words = ["serve", "models/tiny", "--media", "media", "--port", "0", "--max-model-len", "256"]
    words += ["--max-num-seqs", "32", "--token", "file:token", "--weights-root", "runs"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sightline", *words], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield next(line for line in process.stdout if "serving" in line).split()[-1], process
    finally:
        process.kill()
        process.communicate()


def write_model(folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("vowels.py"), folder)
    write_tiny("qwen_vl", folder / "models" / "tiny", seed=0)
    (folder / "token").write_text(TOKEN)


def test_killed_server_is_replaced_by_a_third(tmp_path: Path) -> None:
    write_model(tmp_path)
    with serving(tmp_path) as (a, killed), serving(tmp_path) as (b, _), serving(tmp_path) as (c, _):
        text = RUN.replace("SERVERS", json.dumps([a, b])).replace('"apart"', '"job"')
        (tmp_path / "run.toml").write_text(text)
        job = Job(tmp_path, "run.toml", "run.steps=400")
        job.wait_for_step(2)
        killed.kill()
        added = sightline("servers", job.run_dir.path, "add", c, cwd=tmp_path).stdout
        assert f"{c} gets turns once it has adopted the newest version" in added
        job.wait_until(lambda: ask(c, "/sightline/v1/stats")["totals"]["finished"] > 8, 120)
        output = sightline("servers", job.run_dir.path, cwd=tmp_path).stdout
        assert f"{a}  lost" in output and f"{b}  " in output and f"{c}  " in output
        sightline("servers", job.run_dir.path, "remove", a, cwd=tmp_path)
        sightline("stop", job.run_dir.path, cwd=tmp_path)
        printed = job.output(60)
        assert job.process.returncode == 0, printed
        events = list(read_events(job.run_dir.metrics))
        assert not [event for event in events if event.kind == "dropped"], "no rollout was lost"
        words = [str(event.values["words"]) for event in events if event.kind == "process"]
        assert any("It has stopped" in line and a in line for line in words)
        last = ledger(job.run_dir)[-1][0]
        # The list outlasts the processes. From now on, the third server belongs to the run.
        before = ask(c, "/sightline/v1/stats")["totals"]["finished"]
        steps = f"run.steps={last + 2}"
        sightline("rl", "--plain", "--resume", job.run_dir.path, steps, cwd=tmp_path)
        assert [step for step, _ in ledger(job.run_dir)] == list(range(1, last + 3))
        assert summary(job.run_dir)["mismatch_kl"] < 1e-6
        assert ask(c, "/sightline/v1/stats")["totals"]["finished"] > before
        assert [ask(server, "/health")["leased_to"] for server in (b, c)] == ["", ""]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[str]]:
    shutil.copy(Path(__file__).with_name("vowels.py"), tmp_path)
    model, media = tmp_path / "models" / "tiny", tmp_path / "media"
    write_tiny("qwen_vl", model, seed=0)
    (tmp_path / "token").write_text(TOKEN)
    more = ["--max-model-len", "256", "--max-num-seqs", "32"]
    more += ["--token", f"file:{tmp_path / 'token'}"]
    more += ["--weights-root", str(tmp_path / "runs")]
    with (
        temporary_server(model, media, more) as first,
        temporary_server(model, media, more) as second,
    ):
        yield [first, second]


def test_two_servers_serve_successive_runs(tmp_path: Path, servers: list[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("SERVERS", json.dumps(servers)))
    num_sampled = [0, 0]
    for name in ("apart-001", "apart-002"):
        sightline("rl", "--plain", "run.toml", cwd=tmp_path)
        run_dir = RunDir(tmp_path / "runs" / name)
        assert [step for step, _ in ledger(run_dir)] == list(range(1, STEPS + 1))
        assert not (run_dir.logs / "server.log").exists(), "the run started none"
        # The second run begins with its own weights, not with those of the first run.
        assert summary(run_dir)["mismatch_kl"] < 1e-6
        assert summary(run_dir)["bad_media"] == 0
        server_totals = [ask(server, "/sightline/v1/stats")["totals"] for server in servers]
        sampled = [totals["sampled_tokens"] for totals in server_totals]
        assert all(now > before for now, before in zip(sampled, num_sampled, strict=True))
        health = [ask(server, "/health") for server in servers]
        assert [h["version"].split("-")[:2] for h in health] == [
            [str(STEPS), run_dir.read_id()]
        ] * 2
        assert [h["leased_to"] for h in health] == ["", ""], "the run has given its leases back"
        num_sampled = sampled


def test_server_with_other_serving_settings_is_refused(tmp_path: Path, servers: list[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("SERVERS", json.dumps(servers)))

    def refused(*overrides: str) -> str:
        done = sightline("rl", "--plain", "run.toml", *overrides, cwd=tmp_path, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "has fingerprint" in refused("model.max_pixels=4096")
    assert "accepts 256 tokens" in refused("inference.max_model_len=512")
    assert "has engine 'torch', the run 'vllm'" in refused("inference.engine=vllm")
    assert "without [media] root" in refused("media.root=")
    assert "which take files" in refused("trainer.publish=broadcast")
    assert "does not answer" in refused('inference.servers=["http://127.0.0.1:9"]')
    assert "write it as http://127.0.0.1:9" in refused('inference.servers=["127.0.0.1:9"]')
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_run_ends_on_a_leased_server_or_a_different_sampler_policy(
    tmp_path: Path, servers: list[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("SERVERS", json.dumps(servers)))

    def lease(seconds: float) -> None:
        body = json.dumps({"run": "beef", "seconds": seconds}).encode()
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        request = urllib.request.Request(f"{servers[1]}/sightline/v1/lease", body, headers)
        urllib.request.urlopen(request, timeout=30).close()

    def failed(*overrides: str) -> tuple[str, RunDir]:
        done = sightline("rl", "--plain", "run.toml", *overrides, cwd=tmp_path, check=False)
        assert done.returncode == 2
        run_dir = RunDir(max((tmp_path / "runs").iterdir()))
        assert not run_dir.ledger.exists() or not ledger(run_dir), "nothing was trained on"
        assert not list(run_dir.weights.glob("v000001*"))
        return done.stderr, run_dir

    lease(600)
    done = sightline("rl", "--plain", "run.toml", cwd=tmp_path, check=False)
    assert done.returncode == 2 and "is leased to run beef" in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing was started"
    lease(0)
    output, run_dir = failed("orchestrator.max_mismatch=1e-30")
    assert "step 1: sampler and trainer differ by a KL of" in output
    assert "tokens that version 0 sampled" in output and "worst token" in output
    assert run_dir.scores_of(1).is_file()
    assert ask(servers[1], "/health")["leased_to"] == "", "a run that fails gives its lease back"
