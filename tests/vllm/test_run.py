"""A run whose server is vLLM: five steps of the demo, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

from sightline.run import RunDir
from tests.loop.jobs import EXAMPLES, sightline, summary


def test_demo_runs_five_steps_with_vllm(tmp_path: Path, python: str) -> None:
    sightline("model", "tiny", "models/tiny", cwd=tmp_path)
    sightline("sft", EXAMPLES / "warmup.toml", "run.steps=20", cwd=tmp_path)
    (tmp_path / "models" / "warm").rename(tmp_path / "models" / "half")
    sightline(
        "rl", "--plain", EXAMPLES / "vllm.toml", f"inference.python={json.dumps(python)}",
        "run.steps=5", "eval.tasks=16", cwd=tmp_path,
    )  # fmt: skip
    run_dir = RunDir(tmp_path / "runs" / "color_codeword_vllm-001")
    run_summary = summary(run_dir)
    assert run_summary["steps"] == 5
    assert run_summary["bad_media"] == 0
    assert run_summary["mismatch_kl"] < 1e-6
    output = sightline("inspect", "--require-images", run_dir.path, cwd=tmp_path).stdout
    assert output
