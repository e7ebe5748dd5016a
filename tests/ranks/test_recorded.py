"""Training from recorded traces: the real orchestrator and trainer, no sampler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loop.jobs import ledger, sightline

from sightline.run import RunDir
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STEPS = 4


def test_recorded_rollouts_train_and_the_step_is_taken_apart(tmp_path: Path) -> None:
    done = sightline(
        "bench", "train", "--steps", str(STEPS), "--warmup", "1", "--rollouts", "4", "--turns", "2",
        "--side", "64", "--answer", "8", "--threads", "1", "--dir", tmp_path / "bench",
        "trainer.ranks=2", "trainer.micro_batch_tokens=256", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == STEPS - 1 and found["images"] == 8
    stages = {"wait", "materialize", "forward", "backward", "optimizer", "publish"}
    assert set(found["seconds"]) == stages
    assert found["seconds"]["forward"] > 0 and found["seconds"]["backward"] > 0

    run_dir = RunDir(tmp_path / "bench" / "run")
    assert [step for step, _ in ledger(run_dir)] == list(range(1, STEPS + 1))
    events = list(read_events(run_dir.metrics))
    for step, event in by_step(events, "train").items():
        values = event.values
        assert values["images"] == 8 and values["distinct_images"] == 8
        assert values["images_made"] + values["images_from_cache"] == values["distinct_images"]
        assert values["bad"] == {}, "the trainer made the pixels that the recording has"
        assert set(values["seconds"]) == stages
        assert 0 <= values["hidden_share"] <= 1
        cache = values["caches"]["trainer_pixels"]
        assert set(cache) == {"hits", "misses", "evictions", "bytes"}
        # The feed is ahead of the loop by a step or two.
        assert cache["misses"] >= 8 * step and cache["bytes"] > 0
    for step, event in by_step(events, "step").items():
        assert event.values["lag_max"] <= 1, step
        assert event.values["store_bytes"] > 0
