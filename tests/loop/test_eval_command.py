"""`sightline eval` on a checkpoint measures what the run's own evaluation of it measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loop.jobs import sightline
from sightline.families.registry import write_tiny
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

TASKS = 12
RUN = f"""
[run]
name = "measured"
steps = 1
seed = 7
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 8
[orchestrator]
groups_per_step = 2
group_size = 4
[eval]
tasks = {TASKS}
[inference]
max_num_seqs = 32
max_model_len = 256
"""


def test_a_checkpoint_earns_what_it_earned_in_its_run(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("vowels.py"), tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    write_tiny("qwen_vl", tmp_path / "models" / "tiny", seed=0)
    said = sightline("rl", "--plain", "run.toml", cwd=tmp_path).stdout
    run_dir = RunDir(tmp_path / said.strip().splitlines()[-2].removeprefix("run: "))
    evals = {str(e.values["name"]): e.values for e in read_events(run_dir.metrics)
             if e.kind == "eval"}  # fmt: skip
    final = run_dir.checkpoints / "final"
    for name, step, checkpoint in (("start", 0, tmp_path / "models" / "tiny"), ("final", 1, final)):
        output = tmp_path / f"{name}.jsonl"
        sightline(
            "eval", "--run", run_dir.path, "--checkpoint", checkpoint, "--output", output,
            "--max-concurrent", "3", cwd=tmp_path,
        )  # fmt: skip
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        traces = list(read_traces(run_dir.eval_traces(f"{name}_{step:06d}")))
        assert [line["task"] for line in lines] == [trace.task for trace in traces]
        assert [(line["reward"], line["parts"]) for line in lines] == [
            (trace.reward, trace.rewards) for trace in traces
        ]
        mean = sum(line["reward"] for line in lines) / TASKS
        assert mean == pytest.approx(evals[name]["reward"])
        assert len({line["reward"] for line in lines}) > 1, "a mean of equals proves little"
