"""`sightline sft` on two ranks: the weights equal those of one rank, also after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import making
import pytest
import torch
from loop.jobs import live_processes, sightline
from rank_steps import find_error, record
from safetensors.torch import load_file

from sightline.run import RunDir
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STEPS = 8


@pytest.fixture(scope="module")
def sft_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a file of conversations of which some show images, and a run file."""
    home = tmp_path_factory.mktemp("sft")
    sightline("model", "tiny", "tiny", cwd=home)
    lines = []
    for i in range(12):
        content: list[dict[str, Any]] = [{"type": "text", "text": "what is this " * (i % 4 + 1)}]
        if i % 3:
            making.image(random.Random(i), 64, 64).save(home / f"{i}.png")
            content.append({"type": "image"})
        talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "AB" * i}]
        lines.append(json.dumps({"messages": talk, "images": [f"{i}.png"] * (i % 3 > 0)}))
    (home / "talks.jsonl").write_text("\n".join(lines) + "\n")
    (home / "run.toml").write_text(
        f"""
[run]
name = "job"
steps = {STEPS}
[model]
path = "tiny"
[data]
path = "talks.jsonl"
eval_fraction = 0.25
[sft]
output_dir = "out"
batch_size = 4
eval_every = 4
[trainer]
device = "cpu"
lr = 1e-3
checkpoint_every = 2
micro_batch_tokens = 60
"""
    )
    return home


def trained(home: Path, *words: str) -> tuple[RunDir, dict[str, torch.Tensor]]:
    output = sightline("sft", "run.toml", *words, cwd=home).stdout
    run_dir = RunDir(home / output.rpartition("run: ")[2].split()[0])
    return run_dir, load_file(
        home / output.rpartition("checkpoint: ")[2].strip() / "model.safetensors"
    )


@pytest.fixture(scope="module")
def together(sft_home: Path) -> tuple[RunDir, dict[str, torch.Tensor]]:
    return trained(sft_home, "trainer.ranks=2", "sft.output_dir=two")


@pytest.mark.thorough
def test_two_ranks_match_one_rank(
    sft_home: Path, together: tuple[RunDir, dict[str, torch.Tensor]]
) -> None:
    alone = trained(sft_home, "sft.output_dir=one")
    for kind in ("sft", "sft_eval"):
        ours, theirs = (by_step(read_events(r.metrics), kind) for r, _ in (together, alone))
        assert ours.keys() == theirs.keys() and len(ours) == {"sft": STEPS, "sft_eval": 3}[kind]
        for step, event in ours.items():
            assert event.values["loss"] == pytest.approx(theirs[step].values["loss"], rel=1e-4)
    record("sft", 2, weights=find_error(together[1], alone[1]))
    for name, one in alone[1].items():
        # AdamW divides by the gradient's size. If a gradient is noise, so is its direction.
        assert float((together[1][name] - one).norm()) <= 1e-2 * float(one.norm()) + 1e-4, name


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["sft", "sft-1"])
def test_killed_rank_ends_all_ranks_and_resume_is_bit_identical(
    sft_home: Path, together: tuple[RunDir, dict[str, torch.Tensor]], victim: str
) -> None:
    before = set((sft_home / "runs").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "sightline", "sft", "run.toml", "trainer.ranks=2",
         f"sft.output_dir={victim}.out"],
        cwd=sft_home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        new_runs = set((sft_home / "runs").iterdir()) - before
        if (
            new_runs
            and max(by_step(read_events(RunDir([*new_runs][0]).metrics), "sft"), default=0) >= 3
        ):
            break
        time.sleep(0.05)
    [path] = new_runs
    run_dir = RunDir(path)
    os.kill(pid_of(victim, process.pid), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert f"{victim} was killed by SIGKILL" in output
    assert f"sightline sft --resume runs/{path.name}" in output
    assert not live_processes(run_dir)
    sightline("sft", "--resume", run_dir.path, cwd=sft_home)
    after = load_file(sft_home / f"{victim}.out" / "model.safetensors")
    record(f"sft resumed after {victim} was killed", 2, weights=find_error(after, together[1]))
    assert all(torch.equal(after[name], tensor) for name, tensor in together[1].items())
    assert sorted(by_step(read_events(run_dir.metrics), "sft")) == list(range(1, STEPS + 1))


def pid_of(name: str, launcher: int) -> int:
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        if "process" in words and name in words and int(parent) == launcher:
            return int(folder.name)
    raise AssertionError(f"no process {name!r}")
