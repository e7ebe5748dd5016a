"""A run file for every launcher, with its model, task and media service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loop.network import run_on

from sightline.families.registry import write_tiny

RUN = """
[run]
name = "job"
dir = "{folder}/runs"
steps = {steps}
[model]
path = "{folder}/tiny"
[media]
root = "http://127.0.0.1:8100"
token = "env:MEDIA_TOKEN"
cache_dir = "{folder}/cache"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 6
workers = 1
[orchestrator]
groups_per_step = 2
group_size = 4
[trainer]
checkpoint_every = 2
publish = "store"
device = "cpu"
threads = 1
[inference]
max_num_seqs = 16
max_model_len = 128
device = "cpu"
threads = 1
[eval]
tasks = 0
[launch]
python = "{python}"
scratch = "{folder}/scratch"
"""


@contextmanager
def small_run(folder: Path, enter: Sequence[str], steps: int, more: str = "") -> Iterator[Path]:
    """Yield the run file while a media service serves its images."""
    write_tiny("qwen_vl", folder / "tiny", seed=0)
    shutil.copy(Path(__file__).parents[1] / "loop" / "vowels.py", folder)
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder, steps=steps, python=sys.executable) + more)
    words = [*enter, sys.executable, "-m", "sightline", "media", "serve", str(folder / "images")]
    log = folder / "media.log"
    with run_on([*words, "--token", "env:MEDIA_TOKEN"], log) as service:
        deadline = time.monotonic() + 300
        while "serving" not in log.read_text():
            assert service.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield path


def build_environ(folder: Path) -> dict[str, str]:
    """The variables of whatever takes part in the run."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"MEDIA_TOKEN": "m" * 32, "PYTHONPATH": path}


def sightline(enter: Sequence[str], *words: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [*enter, sys.executable, "-m", "sightline", *words],
        cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
