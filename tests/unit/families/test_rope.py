"""Rotary frequencies that would change with a batch's longest sequence: constant or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline.compute.attention import build_attention_pattern
from sightline.compute.model import load_model
from sightline.config import RunFile, SftFile
from sightline.errors import ConfigError, FamilyError
from sightline.families import load_family
from sightline.families.registry import load_serving, write_tiny
from sightline.families.rope import find_position_limit
from sightline.inference.serve import ServerComponents
from sightline.inference.server_spec import ServerSpec
from sightline.launch.checks.model import find_family
from sightline.media import MediaStore
from sightline.pack import PackSize, pack
from sightline.rollout.engines import load_engine
from sightline.trainer.alignment_checks import check_micro_batch
from tests import making
from tests.contract.cases.anyvlm import write_kind

LENGTH = 24
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LENGTH,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
}


@pytest.fixture(
    scope="module",
    params=[("qwen_vl", DYNAMIC), ("llama3", LONG), ("llava", DYNAMIC), ("llava", LONG)],
    ids=lambda case: f"{case[0]}-{case[1]['rope_type']}",
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose frequencies would change beyond `LENGTH` tokens."""
    name, rope = request.param
    path = tmp_path_factory.mktemp(name) / "model"
    if name == "llava":
        write_kind(name, path)
    else:
        write_tiny(name, path)
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    text.pop("rope_scaling", None)
    text["rope_parameters"] = (text.get("rope_parameters") or {}) | rope
    text["max_position_embeddings"] = LENGTH if rope is DYNAMIC else 4 * LENGTH
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_long_neighbour_does_not_change_a_sequence(folder: Path) -> None:
    family = load_family(folder)
    forward = load_model(folder, family, "cpu", "float32")

    def compute(*lengths: int) -> torch.Tensor:
        ids = torch.tensor([[t % 90 + 5 for n in lengths for t in range(n)]])
        ends = np.repeat(np.cumsum(lengths), lengths)
        along = torch.cat([torch.arange(n) for n in lengths]).expand(family.num_axes, 1, -1)
        pattern = build_attention_pattern(ends, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            return forward.logits(forward.hidden(ids, along, None, None, pattern)[0])

    short = compute(LENGTH // 2)
    packed = compute(LENGTH // 2, 4 * LENGTH)[: LENGTH // 2]
    assert (packed - short).abs().max() < 1e-5 * short.abs().max()
    # A long sequence must not change later ones either.
    assert torch.equal(compute(LENGTH // 2), short)


def test_longer_sequences_are_refused_by_launcher_server_and_trainer(
    folder: Path, settings: ServerSpec, store: MediaStore
) -> None:
    family = load_family(folder)
    assert family.position_limit == LENGTH
    spec = settings.replace(path=str(folder))
    assert spec.inference.max_model_len > LENGTH
    with pytest.raises(ConfigError, match=f"exceeds {LENGTH} tokens") as refused:
        ServerComponents.load(spec)
    assert f"max_model_len = {LENGTH} or less" in refused.value.fix
    config = RunFile.model_validate(
        {"model": {"path": str(folder)}, "env": {"name": "color_codeword"}}
    )
    with pytest.raises(ConfigError, match=f"exceeds {LENGTH} tokens"):
        load_engine("torch").check(config, family)
    if family.shows_media:
        sft = SftFile.model_validate(
            {
                "model": {"path": str(folder)},
                "env": {"name": "color_codeword"},
                "sft": {"output_dir": str(folder / "warm")},
            }
        )
        with pytest.raises(ConfigError, match="max_sequence_tokens = 0, but the rotary"):
            find_family(sft)
        find_family(sft.with_values("trainer", max_sequence_tokens=LENGTH))
    ServerComponents.load(spec.replace(max_model_len=LENGTH))
    samples = making.samples(folder, store, count=4)
    assert max(len(sample.token_ids) for sample in samples) > LENGTH
    with pytest.raises(FamilyError, match="a sequence of .* positions") as long:
        packed = pack(samples, 3, family, PackSize(1 << 20, 1 << 20))[0]
        check_micro_batch(packed, family, (), 1 << 20)
    assert f"max_sequence_tokens = {LENGTH}" in long.value.fix


def test_vllm_is_refused(folder: Path) -> None:
    with pytest.raises(FamilyError, match="vLLM scales the rotary frequencies"):
        load_serving(folder, load_family(folder))


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 9}, 0),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "max_position_embeddings": 9}, 0),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": 9}, 9),
        ({"llm_config": {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 9}}, 9),
        ({"vision_config": {"rope_scaling": {"type": "dynamic"}}}, 0),
        ({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4}}, 4),
        ({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 5}, 5),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "dynamic"},
                },
                "max_position_embeddings": 9,
            },
            9,
        ),
    ],
)
def test_the_limit_is_read_from_each_place_in_a_config(config: dict[str, Any], limit: int) -> None:
    assert find_position_limit(config) == limit


def test_a_missing_length_is_refused() -> None:
    with pytest.raises(FamilyError, match="but no max_position_embeddings"):
        find_position_limit({"rope_scaling": {"type": "dynamic", "factor": 2}})
