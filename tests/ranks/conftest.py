from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_steps import TABLE_VARIABLE, Found, take_step

from sightline.families.registry import write_tiny

NAMES = {"one": "tree", "routes": "replayed routes", "lost": "lost image"}
"""Names of options in the table."""
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


def pytest_configure() -> None:
    if TABLE_VARIABLE not in os.environ:  # xdist's workers inherit it
        os.environ[TABLE_VARIABLE] = tempfile.mkstemp(prefix="equality-")[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how much the results of several ranks differ from those of one rank."""
    if hasattr(terminalreporter.config, "workerinput"):  # a worker of xdist
        return
    table = Path(os.environ.pop(TABLE_VARIABLE))
    lines = table.read_text().splitlines()
    table.unlink()
    if not lines:
        return
    terminalreporter.section("largest relative errors, compared with one rank")
    columns = ("gradients", "loss", "weights")
    rows = [("case", "ranks", *columns)]
    for case, ranks, errors in sorted(map(json.loads, set(lines))):
        texts = (f"{errors[name]:.1e}" if name in errors else "-" for name in columns)
        rows.append((case, str(ranks), *texts))
    width = max(len(row[0]) for row in rows)
    for case, *cells in rows:
        line = f"{case:{width}} " + " ".join(f"{cell:>9}" for cell in cells)
        terminalreporter.write_line(line)


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
            results[key].case = " ".join([*kind, *(NAMES.get(word, word) for word in words)])
        return results[key]

    return run
