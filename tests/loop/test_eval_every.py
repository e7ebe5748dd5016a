"""Held-out tasks between the steps of a run: each against that step's weights, the best kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loop.jobs import sightline
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

STEPS = 4
RUN = f"""
[run]
name = "evaluated"
steps = {STEPS}
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 8
[orchestrator]
groups_per_step = 3
group_size = 4
[trainer]
lr = 2e-3
[eval]
tasks = 4
every = 1
[inference]
max_num_seqs = 32
max_model_len = 256
"""


def test_every_step_is_evaluated_on_its_own_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    shutil.copy(Path(__file__).with_name("vowels.py"), tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    write_tiny("qwen_vl", tmp_path / "models" / "tiny", seed=0)
    said = sightline("rl", "--plain", "run.toml", cwd=tmp_path).stdout
    run_dir = RunDir(tmp_path / said.strip().splitlines()[-2].removeprefix("run: "))
    events = list(read_events(run_dir.metrics))
    evals = {str(e.values["name"]): e.values for e in events if e.kind == "eval"}
    skipped = {e.step for e in events if e.kind == "eval_skipped"}
    played = {int(name.removeprefix("step ")) for name in evals if name.startswith("step ")}
    assert evals.keys() >= {"start", "final"}
    assert played and played | skipped == set(range(1, STEPS)) and not played & skipped
    for step in played:
        traces = list(read_traces(run_dir.eval_traces(f"step_{step:06d}")))
        assert len(traces) == 4
        # The run's own server had newer weights by then; this one did not.
        versions = {s.version for t in traces for node in t.turns for s in node.versions}
        assert versions == {step}
        low, high = evals[f"step {step}"]["interval"]
        assert low <= evals[f"step {step}"]["reward"] <= high
    progress = json.loads(run_dir.progress.read_bytes())
    measures = {step: evals[f"step {step}"]["reward"] for step in played}
    measures[STEPS] = evals["final"]["reward"]
    assert progress["best_measure"] == max(measures.values())
    best = run_dir.checkpoints / "best"
    assert load_family(best).fingerprint == load_family(tmp_path / "models" / "tiny").fingerprint
    AutoModelForImageTextToText.from_pretrained(best, local_files_only=True)
