"""A rank reads only its rows of a checkpoint, bit-identical to those of the whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.families.registry import write_tiny
from sightline.launch.processes import reserve_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parent / "rank_load.py"


def run_ranks(size: int, *arguments: str) -> list[str]:
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * size, "\n".join(outputs)
    return outputs


def add_meeting(case: str) -> str:
    return f"{case}=127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"


@pytest.mark.thorough
def test_shards_are_bit_identical_to_the_whole_model(tmp_path: Path) -> None:
    checkpoints = {
        "tied": ("qwen_vl", {"tied": True, "dtype": "bfloat16"}),
        "qwen2_5": ("qwen_vl", {"type": "qwen2_5_vl"}),
        "qwen3_5": ("qwen_vl", {"type": "qwen3_5"}),
        "text": ("qwen_vl", {"type": "qwen3"}),
        "experts": ("qwen_vl", {"type": "qwen3_vl_moe", "dtype": "bfloat16"}),
        "kimi": ("kimi_k25", {}),
        "glm": ("glm_v", {"type": "glm4v_moe"}),
    }
    for name, (family, options) in checkpoints.items():
        write_tiny(family, tmp_path / name, seed=0, **options)
    store_as_published(tmp_path / "kimi", tmp_path / "published")
    cases = (
        "tied", "tied:bfloat16:lora", "qwen2_5:frozen", "qwen3_5", "text", "experts:bfloat16",
        "kimi:bfloat16", "glm", "published:bfloat16", "published:lora",
    )  # fmt: skip
    outputs = run_ranks(2, *(add_meeting(str(tmp_path / case)) for case in cases))
    assert [text.count("same") for text in outputs] == [len(cases)] * 2, outputs


def store_as_published(source: Path, target: Path) -> None:
    """Kimi's own parameter names and parts: a matrix per expert, and one for queries, keys and
    values.
    """
    shutil.copytree(source, target)
    stored: dict[str, torch.Tensor] = {}
    vision: dict[str, list[torch.Tensor]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        place, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            for i, expert in enumerate(tensor):
                for half, matrix in zip(("gate", "up"), expert.chunk(2), strict=True):
                    stored[f"{place}.experts.{i}.{half}_proj.weight"] = matrix
        elif part == "down_proj":
            stored |= {f"{place}.experts.{i}.{part}.weight": m for i, m in enumerate(tensor)}
        elif (
            name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and "vision" in name
        ):
            vision.setdefault(name.split(".")[3], []).append(tensor)
        else:
            stored[name] = tensor
    for block, parts in vision.items():
        stored[f"vision_tower.encoder.blocks.{block}.wqkv.weight"] = torch.cat(parts)
    assert vision
    names = {n: n.replace("model.language_model", "language_model.model") for n in stored}
    parts = {names[name]: tensor.contiguous().clone() for name, tensor in stored.items()}
    save_file(parts, target / "model.safetensors", {"format": "pt"})


@pytest.mark.thorough
def test_a_rank_never_holds_more_than_its_share(tmp_path: Path) -> None:
    size: dict[str, Any] = {"hidden": 512, "layers": 8, "intermediate": 3072, "vocab": 8192}
    size["dtype"] = "bfloat16"  # other than the model's: a CPU would else use the file's own pages
    write_tiny("qwen_vl", tmp_path / "large", seed=0, **size)
    nbytes = 2 * (tmp_path / "large" / "model.safetensors").stat().st_size
    assert nbytes > 180 << 20
    outputs = run_ranks(2, add_meeting(f"{tmp_path / 'large'}:measured"))
    num_held = [int(text.rpartition("held ")[2]) for text in outputs]
    # Half of it: the rest is Python, FSDP and the rows of one tensor.
    assert all(0.45 * nbytes < held_bytes < 0.75 * nbytes for held_bytes in num_held), (
        num_held,
        nbytes,
    )
