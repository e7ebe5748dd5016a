"""Checkpoints of published shapes with random weights, written as they are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import sightline.families.qwen_vl
from sightline.errors import DiskFull, FamilyError
from sightline.families.checkpoint_files import read_shapes
from sightline.families.registry import write_tiny
from sightline.families.tiny_checkpoint import (
    LARGE_HIDDEN,
    describe_checkpoint,
    lay_out_weights,
)

FOLDER = Path(sightline.families.qwen_vl.__file__).parent
# Parameters in billions, as on the models' pages, but without the 0.24B of Qwen3.5's MTP layer,
# which transformers' class does not have.
BILLIONS = {
    "2b": 2.13, "qwen3-vl-4b": 4.44, "qwen3-vl-8b": 8.77, "qwen3-vl-30b-a3b": 31.07,
    "qwen3.5-4b": 4.54, "qwen3.5-9b": 9.41, "qwen3.5-35b-a3b": 35.11,
}  # fmt: skip
# One layer of each kind, as wide as a streamed checkpoint.
SMALL = {
    "hidden": LARGE_HIDDEN, "layers": 2, "vision_layers": 2, "deepstack": [0], "heads": 2,
    "kv_heads": 1, "head_dim": 32, "intermediate": 64, "vision_hidden": 64, "vision_heads": 2,
    "vision_intermediate": 64, "dtype": "bfloat16",
}  # fmt: skip


def test_every_published_shape_is_known() -> None:
    sizes = tomllib.loads((FOLDER / "tiny.toml").read_text())["sizes"]
    assert sizes.keys() == {"tiny", *BILLIONS}


@pytest.mark.parametrize("size", BILLIONS)
def test_tensors_of_a_shape_are_those_of_transformers(size: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    described = describe_checkpoint(FOLDER, size)
    config = AutoConfig.for_model(**json.loads(json.dumps(described.files["config.json"])))
    with torch.device("meta"):
        theirs: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    expected = {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in theirs.state_dict().items()
    }
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    if config.model_type == "qwen3_vl_moe":  # published files store its experts transposed
        expected = {
            name: ((shape[0], *reversed(shape[1:])), dtype)
            if ".experts." in name
            else (shape, dtype)
            for name, (shape, dtype) in expected.items()
        }
    weights = lay_out_weights(described.build("meta"), described.experts)
    assert {name: (tuple(x.shape), x.dtype) for name, x in weights.items()} == expected
    assert round(sum(tensor.numel() for tensor in weights.values()) / 1e9, 2) == BILLIONS[size]


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5"])
def test_streamed_shards_load_strictly_and_compute_finite_numbers(
    kind: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny("qwen_vl", tmp_path / name, seed, type=kind, shard_bytes=10**6, **SMALL)
    folder = tmp_path / "a"
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and {file.name for file in files} == set(index["weight_map"].values())
    assert index["weight_map"].keys() == read_shapes(folder).keys()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert all(index["weight_map"][name] == file.name for name in opened.keys())
        first, again, other = ((tmp_path / n / file.name).read_bytes() for n in ("a", "b", "c"))
        assert first == again != other
        assert file.stat().st_mode & 0o777 == 0o644
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, local_files_only=True, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    std = {
        name: float(p.detach().float().std()) for name, p in model.named_parameters() if p.dim() > 1
    }
    assert all(0.04 < value < 0.06 for value in std.values()), std
    own = type(model)(model.config)  # transformers' own values of vectors
    for name, parameter in own.named_parameters():
        if parameter.dim() < 2 and not name.endswith("A_log"):
            assert torch.equal(model.get_parameter(name), parameter.bfloat16()), name
    assert model(input_ids=torch.arange(16)[None]).logits.isfinite().all()


def test_weights_beyond_the_disk_are_refused_with_their_size(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"the weights take 2,048,\d+\.\d GB"):
        write_tiny("qwen_vl", tmp_path, 0, vocab=10**12, tied=True, **SMALL)
    assert list(tmp_path.iterdir()) == []


WRITE = """
import resource, sys, torch
from pathlib import Path
from sightline.families.random_weights import write_random_weights
shapes = {str(i): torch.empty(1 << 20, 100, device="meta", dtype=torch.bfloat16) for i in (1, 2)}
tiny = {"0": torch.empty(8, 8, device="meta", dtype=torch.bfloat16)}
(Path(sys.argv[1]) / "first").mkdir()
write_random_weights(Path(sys.argv[1]) / "first", tiny, {}, 0, 0.02)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_random_weights(Path(sys.argv[1]), shapes, {}, 0, 0.02)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "model.safetensors").stat().st_size > 400e6
    assert int(done.stdout) * 1024 < 200e6


def test_a_published_tokenizer_replaces_the_tiny_one(tmp_path: Path) -> None:
    # A tokenizer with other ids: the tiny one of another type of the family.
    write_tiny("qwen_vl", tmp_path / "source")
    text = json.loads((tmp_path / "source" / "tokenizer.json").read_text())
    for token in text["added_tokens"]:
        token["id"] += 1000
    text["model"]["vocab"] |= {f"word{i}": len(text["model"]["vocab"]) + i for i in range(1000)}
    published = tmp_path / "published"
    published.mkdir()
    (published / "tokenizer.json").write_text(json.dumps(text))
    write_tiny("qwen_vl", tmp_path / "model", tokenizer_folder=published)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    old = json.loads((tmp_path / "source" / "config.json").read_text())
    assert config["image_token_id"] == old["image_token_id"] + 1000
    assert config["text_config"]["vocab_size"] == old["text_config"]["vocab_size"] + 1000
    with pytest.raises(FamilyError, match="1,297 tokens, and size 'tiny' 1,000 rows"):
        write_tiny("qwen_vl", tmp_path / "small", tokenizer_folder=published, vocab=1000)
    with pytest.raises(FamilyError, match="has no tokenizer.json"):
        write_tiny("qwen_vl", tmp_path / "none", tokenizer_folder=tmp_path)
    text["added_tokens"] = text["added_tokens"][:3]
    (published / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(FamilyError, match="has no token <|object_ref_start|>"):
        write_tiny("qwen_vl", tmp_path / "none", tokenizer_folder=published)
