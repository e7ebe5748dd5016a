"""A run with `[model] exact = true`: its mismatch is exactly zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, Job, sightline, summary
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

WINDOWED = '''
from sightline.envs import Conversation, last_images
from sightline.envs.color_codeword import ColorCodeword


class Windowed(ColorCodeword):
    """Shows the newest square alone: from the second turn on prompts are rendered anew."""

    async def rollout(self, task, chat):
        talk = Conversation(chat, last_images(1))
        chat.send = talk.send
        return await super().rollout(task, chat)
'''


def test_mismatch_is_exactly_0_with_windows_and_after_a_kill(home: Path) -> None:
    (home / "windowed.py").write_text(WINDOWED)
    words = (str(EXAMPLES / "cpu.toml"), *SMALL, "run.steps=6", "env.name=windowed:Windowed")
    job = Job(home, *words, "model.exact=true", "trainer.checkpoint_every=2", "eval.tasks=0")
    job.wait_for_step(3)
    job.kill("trainer")
    assert "packing: flat" in job.output(timeout_s=30)
    sightline("rl", "--plain", "--resume", job.run_dir.path, cwd=home)
    trained = by_step(read_events(job.run_dir.metrics), "train")
    assert set(trained) == set(range(1, 7))
    kls_by_step = {step: event.values["mismatch_kl"] for step, event in trained.items()}
    fresh = {step for step, event in trained.items() if event.values["fresh_tokens"]}
    assert {step for step, kl in kls_by_step.items() if kl == 0.0} == fresh
    assert 1 in fresh and max(fresh) > 3, "also of versions that the resumed trainer made"
    assert summary(job.run_dir)["mismatch_kl"] == 0.0
