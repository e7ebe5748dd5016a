"""The warm-up: through the same packing and forward, on the assistant's own tokens only."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.config import SftFile
from sightline.envs.color_codeword import LETTERS
from sightline.message import assistant, system, user
from sightline.monitor import RunDir
from sightline.trainer import sft


@pytest.fixture
def parts(tiny_model: Path, tmp_path: Path) -> sft.Parts:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    config = SftFile.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "env": {"name": "color_codeword", "args": {"spelled_share": 0.0}},
            "sft": {"output": str(tmp_path / "out"), "batch_size": 300},
            "run": {"steps": 8},
            "trainer": {"lr": 1e-2, "device": "cpu"},
        }
    )
    return sft.build(config, run_dir)


def test_demonstrations_as_trained_tell_nothing_about_colours(parts: sft.Parts) -> None:
    """The letters that the warm-up trains on are right no more often than by chance."""
    batch = sft._batch(parts, 1)
    right = total = 0
    for i, sample in enumerate(batch.samples):
        said = parts.renderer.decode(sample.token_ids.numpy()[sample.trained.numpy()].tolist())
        last = said.replace("<|im_end|>", " ").split()[-1]
        truth = [letter for letter, _ in parts.env.task(i, "sft").data]
        right += sum(a == b for a, b in zip(last, truth, strict=True))
        total += 3
    assert abs(right / total - 1 / len(LETTERS)) < 0.04


def test_only_what_the_assistant_says_is_trained(parts: sft.Parts) -> None:
    talk = [system("be brief"), user("red"), assistant("A B"), user("blue"), assistant("C")]
    sample = sft.sample_of(talk, parts.renderer, "s")
    trained = parts.renderer.decode(sample.token_ids.numpy()[sample.trained.numpy()].tolist())
    assert trained == "A B<|im_end|>C<|im_end|>"


def test_the_loss_falls_and_a_checkpoint_is_written(parts: sft.Parts, tmp_path: Path) -> None:
    from sightline.monitor import read_events

    small = parts.config.sft.model_copy(update={"batch_size": 16})
    parts.config = parts.config.model_copy(update={"sft": small})
    sft.run(parts)
    losses = [e.values["loss"] for e in read_events(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
