"""A tiny checkpoint, trained by `sightline sft` until it follows the answer format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline import config
from sightline.bench.harness.workspace import run_sightline, write_tiny
from sightline.config import SftFile


def build_warm_model(folder: Path, values: dict[str, dict[str, Any]]) -> Path:
    """Write a random checkpoint and fine-tune it; `values` are settings of the SFT run file."""
    print("creating a tiny checkpoint and fine-tuning it", flush=True)
    output = folder / "warm"
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "warmup", "dir": str(folder)},
        "model": {"path": str(write_tiny(folder / "tiny"))},
        "sft": {"output_dir": str(output)},
    }
    for name, section in values.items():
        sections[name] = {**sections.get(name, {}), **section}
    file = config.validate_config(SftFile, sections, "warm-up")
    run_sightline("sft", folder / "warmup.toml", config.dump_toml(file))
    return output
