from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_steps import Found, take_step

from sightline.families.registry import write_tiny

QUICK = """
[run]
name = "job"
steps = 4
[model]
path = "tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 6
workers = 1
[orchestrator]
groups_per_step = 2
group_size = 2
[trainer]
ranks = 2
checkpoint_every = 2
micro_batch_tokens = 64
[inference]
max_num_seqs = 16
max_model_len = 128
[eval]
tasks = 0
"""


@pytest.fixture
def quick_home(tmp_path: Path) -> Path:
    """A folder with `run.toml`: a run of 4 steps on 2 ranks that needs no warm-up."""
    write_tiny("qwen_vl", tmp_path / "tiny", seed=0)
    shutil.copy(Path(__file__).parents[1] / "loop" / "vowels.py", tmp_path)
    (tmp_path / "run.toml").write_text(QUICK)
    return tmp_path


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """Return a function that runs one step on `size` ranks, once for each set of arguments."""
    results: dict[Any, Found] = {}
    models: dict[Any, Path] = {}

    def run(family: str, options: dict[str, str], size: int, *words: str) -> Found:
        kind = (family, *options.values())
        if kind not in models:
            models[kind] = tmp_path_factory.mktemp("models") / "tiny"
            write_tiny(family, models[kind], seed=0, **options)
        if (key := (kind, size, words)) not in results:
            results[key] = take_step(models[kind], size, tmp_path_factory.mktemp("step"), *words)
        return results[key]

    return run
