"""color_codeword in words: warm up, train and score text-only checkpoints.

No output of the run mentions images. `FULL=1` trains until the reward is above chance.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shards import IS_FULL, take_first

from loop.jobs import EXAMPLES, sightline, summary
from sightline.run import RunDir
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]

KINDS = {
    "qwen3": ("--type", "qwen3"),
    "llama": ("--family", "llama3"),
    "generic": ("--family", "anyvlm", "--type", "llama"),
}
IN_WORDS = "env.args.in_words=true"
WARM_UP_STEPS, STEPS = (200, 100) if IS_FULL else (10, 4)
SMALL = () if IS_FULL else ("orchestrator.groups_per_step=4", "eval.tasks=8")


@pytest.mark.parametrize("kind", take_first(list(KINDS), 1))
def test_a_text_only_model_learns_a_code_in_words(tmp_path: Path, kind: str) -> None:
    sightline("model", "tiny", "models/tiny", *KINDS[kind], cwd=tmp_path)
    warm_up = (EXAMPLES / "warmup.toml", IN_WORDS, f"run.steps={WARM_UP_STEPS}")
    sightline("sft", *warm_up, cwd=tmp_path)
    words = (EXAMPLES / "cpu.toml", IN_WORDS, f"run.steps={STEPS}", "rollout.max_tokens=16")
    words += ("inference.max_model_len=192", *SMALL)
    output = sightline("rl", "--plain", *words, cwd=tmp_path).stdout
    assert "packing: trees" in output and re.search(r"images +none", output)

    run_dir = RunDir(tmp_path / output.strip().splitlines()[-2].removeprefix("run: "))
    run_summary = summary(run_dir)
    assert run_summary["images_shown"] == 0 and run_summary["mismatch_kl"] < 1e-5
    assert not {"reward_swapped", "probe", "probes"} & run_summary.keys()
    events = read_events(run_dir.metrics)
    assert len(by_step(events, "train")) == run_summary["steps"] > 0
    report = (run_dir.report / "report.md").read_text().lower()
    for word in ("blind", "swapped", "images shown", "images stored", "bad images"):
        assert word not in report, word
    if IS_FULL:
        assert run_summary["reward_final"] > run_summary["reward_start"] + 0.2

    last = run_dir.path / "checkpoints" / "final"
    score = ("eval", "--run", run_dir.path, "--checkpoint", last, "--tasks", "8")
    played = sightline(*score, cwd=tmp_path).stdout
    assert "reward" in played and "image" not in played
