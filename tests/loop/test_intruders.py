"""A process that belongs to no run attacks a run on the same machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import zmq

from loop.jobs import Job
from sightline.families.registry import write_tiny
from sightline.run import RunDir
from sightline.run.rights import derive_rights
from sightline.wire import control
from sightline.wire.control import PublishedWeights

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

KEY = "sk-7d1f0a-never-to-be-seen"
ENVIRONMENT = """
from vowels import Vowels

class Judged(Vowels):
    def __init__(self, api_key: str) -> None:
        super().__init__()
        self.api_key = api_key

    async def rollout(self, task, chat):
        print("the key is", self.api_key)
        if task.index % 4 == 1:
            raise ValueError(f"401 for key {self.api_key}")
        return await super().rollout(task, chat)
"""
RUN = """
[run]
name = "job"
steps = 3
[model]
path = "models/tiny"
[env]
name = "judged:Judged"
args = { api_key = "file:key" }
[rollout]
max_tokens = 8
workers = 1
[orchestrator]
groups_per_step = 3
group_size = 4
[trainer]
lr = 2e-3
[eval]
tasks = 0
[inference]
max_model_len = 256
"""


def find_option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def post(address: str, token: str = "") -> int:
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(address + "/sightline/v1/adopt", b"{}", headers)
    try:
        return int(urllib.request.urlopen(request, timeout=30).status)
    except urllib.error.HTTPError as error:
        return error.code


def forge(hub: str) -> None:
    """Send the trainer's messages without the secret, and a line of noise."""
    context = zmq.Context()
    forger = context.socket(zmq.DEALER)
    forger.set(zmq.IDENTITY, b"trainer")
    forger.connect(hub)
    forger.send(control.encode(PublishedWeights(999_999, 0, "manifest", {}, 0)))
    host, port = hub.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"one line of garbage\n")
    forger.close(linger=500)
    context.term()


def test_run_accepts_only_its_own_processes_and_writes_no_secret(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("vowels.py"), tmp_path)
    (tmp_path / "judged.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "key").write_text(KEY)
    write_tiny("qwen_vl", tmp_path / "models" / "tiny", seed=0)
    job = Job(tmp_path, "run.toml")
    job.wait_for_step(1)
    run_dir, commands = job.run_dir, ""
    secret = run_dir.secret.read_text()
    for name in ("server", "orchestrator", "trainer", "worker-0"):
        folder = Path(f"/proc/{job.pid_of(name)}")
        commands += (folder / "cmdline").read_text()
    words = commands.split("\0")
    forge(find_option(words, "--hub"))
    server = find_option(words, "--server")
    worker, own = (derive_rights(secret, name) for name in ("worker-0", "server"))
    assert post(server) == post(server, "a guess") == post(server, secret) == 401
    assert post(server, worker.token) == 403 and post(server, own.control_token) == 400
    output = job.output()
    assert job.process.returncode == 0, output
    assert json.loads(run_dir.summary.read_text())["steps"] == 3
    assert "401 for key ***" in run_dir.metrics.read_text()
    assert "the key is ***" in (run_dir.logs / "worker-0.log").read_text()
    for text in (secret, KEY, worker.token, own.control_token, worker.channel):
        assert text not in commands and text not in output
        check_not_written(run_dir, text)
    assert "file:key" in run_dir.config.read_text()
    assert os.stat(run_dir.path).st_mode & 0o777 == 0o700


def check_not_written(run_dir: RunDir, text: str) -> None:
    for file in run_dir.path.rglob("*"):
        if file.is_file() and file != run_dir.secret:
            assert text.encode() not in file.read_bytes(), file
