"""Our side of `python -m benchmarks trl`; TRL itself is in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.trl import GROUP, SAMPLES, SightlineStep, print_table, write_task
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import user


def test_a_step_is_taken_on_the_tokens_of_the_other_side(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MediaStore(tmp_path / "media")
    renderer = load_renderer(tiny_model, store)
    prompts = write_task(tmp_path, renderer.pad_token_ids)
    task = json.loads((tmp_path / "task.json").read_text())
    assert task["samples"] == SAMPLES == GROUP * len(prompts)
    names = [one["image"] for one in prompts[:2]]
    rendered = [
        renderer.render([user(store.put(tmp_path / name), "Which code?")]) for name in names
    ]
    longest = max(len(one.token_ids) for one in rendered)
    padding = [longest - len(one.token_ids) for one in rendered]
    first = {
        "names": names,
        "prompt_ids": [[0] * n + one.token_ids for n, one in zip(padding, rendered, strict=True)],
        "prompt_mask": [[0] * n + [1] * (longest - n) for n in padding],
        "completion_ids": [[5, 6, 0], [7, 8, 9]],
        "completion_mask": [[1, 1, 0], [1, 1, 1]],
        "advantages": [0.5, -0.5],
    }
    ours = SightlineStep(tiny_model, store, tmp_path, prompts, first)
    ours.run(steps=1)
    assert ours.norm > 0 and len(ours.times) == 1
    print_table(ours.times, {"steps": [[2.0, 2.0]] * 2, "generated": [[1.0, 1.0]] * 2})
    assert "TRL, training step" in capsys.readouterr().out
