"""vLLM loads checkpoints of `sightline export` and gives the trainer's answers."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import vllm_servers
from serving import live

from sightline.cli.main import main
from sightline.compute.model import MODEL_DTYPES
from sightline.config import SftFile, dump_toml
from sightline.families import load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin.command import build_vllm_environ
from sightline.media import MediaStore
from sightline.message import user
from sightline.render import Rendered
from sightline.run import RunDir
from sightline.trainer import loop
from sightline.trainer.build import build
from sightline.trainer.learner import Learner
from sightline.wire.generate import SamplingParams

OFFLINE = Path(__file__).parent / "offline.py"
COUNT = 12
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": {"rank": 4, "alpha": 8.0, "vision_targets": ["*"]},
}


def exported(model: Path, home: Path, lora: dict[str, Any]) -> tuple[Learner, Path]:
    """Train a few steps, and export the checkpoint with the command line."""
    run_dir = RunDir(home / "run")
    run_dir.make()
    config = SftFile.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"name": "color_codeword"},
            "sft": {"output_dir": str(home / "output"), "batch_size": 4},
            "run": {"steps": 3},
            "trainer": {"lr": 2e-2, "device": "cpu", "checkpoint_every": 3, "stall_timeout_s": 0},
            "lora": lora,
        }
    )
    run_dir.config.write_text(dump_toml(config))
    parts = build(config, run_dir)
    loop.run(parts)
    assert main(["export", str(run_dir.path), str(home / "exported")]) == 0
    return parts.learner, home / "exported"


def prompt_of(model: Path, media: MediaStore) -> Rendered:
    """An image that fits the grid as it is: vLLM's processor does not resize it."""
    ref = media.put(making.image(random.Random(71), 96, 64))
    return load_renderer(model, media).render([user("what is ", ref, "?")])


def test_unmodified_vllm_matches_the_trainer(
    tiny_model: Path, media: MediaStore, tmp_path: Path, python: str
) -> None:
    rendered = prompt_of(tiny_model, media)
    exported_models = [exported(tiny_model, tmp_path / kind, lora) for kind, lora in KINDS.items()]
    banned = list(exported_models[0][0].pad_ids)
    [slot], ids = rendered.slots, rendered.token_ids
    short = [*ids[: slot.offset + 1], *ids[slot.end :]]  # vLLM repeats the pad
    questions = [
        {
            "model": str(folder),
            "token_ids": short,
            "image": str(media.path(slot.item.ref.digest)),
            "banned": banned,
            "max_tokens": COUNT,
        }
        for _, folder in exported_models
    ]
    (tmp_path / "questions").write_text(json.dumps(questions))
    words = [python, str(OFFLINE), str(tmp_path / "questions"), str(tmp_path / "answers")]
    # One process for all questions: each process that vLLM starts loads its libraries again.
    variables = build_vllm_environ("auto", 1) | {
        "VLLM_PLUGINS": "none",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        words, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=vllm_servers.scale_s(vllm_servers.START_S),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    answers = json.loads((tmp_path / "answers").read_text())
    for (learner, _), answer in zip(exported_models, answers, strict=True):
        ours = making.trainer_logprobs(learner, media, rendered, answer["token_ids"])
        assert len(ours) == COUNT
        np.testing.assert_allclose(answer["logprobs"], ours, atol=1e-3)
    assert answers[0]["logprobs"] != answers[1]["logprobs"]


@pytest.mark.thorough
def test_experts_are_exported_and_published_in_vllms_layout(
    media: MediaStore, tmp_path: Path
) -> None:
    """Files store each expert transposed. One server loads both checkpoints to save a minute."""
    write_tiny("qwen_vl", tmp_path / "tiny", seed=0, type="qwen3_vl_moe")
    learner, folder = exported(tmp_path / "tiny", tmp_path / "moe", {})
    rendered = prompt_of(folder, media)
    settings = ServerSpec.of(
        path=folder, media_roots=(media.root,), device="cpu", max_num_seqs=4, max_model_len=512,
        weights_root="/",
    )  # fmt: skip
    params = SamplingParams(max_tokens=COUNT, seed=5)
    with live(settings) as client:
        check_logprobs(client, learner, media, rendered, params)
        before = making.trainer_logprobs(learner, media, rendered, [1, 2, 3])
        for parameter in learner.forward.model.parameters():
            parameter.data.mul_(1.1)
        assert not np.allclose(
            before, making.trainer_logprobs(learner, media, rendered, [1, 2, 3]), atol=1e-2
        )
        model = learner.forward.model
        path, _ = making.publish(model, tmp_path / "weights", 4, MODEL_DTYPES["float32"])
        client.adopt(path)
        check_logprobs(client, learner, media, rendered, params)


def check_logprobs(
    client: Any, learner: Learner, media: MediaStore, rendered: Rendered, params: SamplingParams
) -> None:
    choice = client.generate(rendered.token_ids, rendered.slots, params).choices[0]
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    ours = making.trainer_logprobs(learner, media, rendered, choice.token_ids)
    np.testing.assert_allclose(logprobs, ours, atol=1e-4)
