"""`sightline bisect` on runs that were played: equal ones, and ones with a planted cause."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from loop.jobs import Job, sightline
from sightline.families.registry import write_tiny

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]

CONFIG = """
[run]
name = "job"
steps = 2
[model]
path = "tiny"
exact = true
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 4
workers = 1
[orchestrator]
groups_per_step = 2
group_size = 2
max_lag = 0
diagnostics_every = 0
[trainer]
micro_batch_tokens = 64
[inference]
max_model_len = 128
[eval]
tasks = 0
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models that differ in their vision towers."""
    home = tmp_path_factory.mktemp("home")
    write_tiny("qwen_vl", home / "tiny", seed=0)
    shutil.copytree(home / "tiny", home / "other")
    tensors = load_file(home / "other" / "model.safetensors")
    for name in tensors:
        tensors[name] *= 1.1 if "visual" in name else 1.0
    save_file(tensors, home / "other" / "model.safetensors", {"format": "pt"})
    shutil.copy(Path(__file__).parent / "vowels.py", home)
    (home / "run.toml").write_text(CONFIG)
    return home


def play(home: Path, *words: str) -> Path:
    job = Job(home, "run.toml", *words)
    output = job.output()
    assert job.process.returncode == 0, output[-3000:]
    return job.run_dir.path


@pytest.fixture(scope="module")
def first(home: Path) -> Path:
    return play(home)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        pytest.param((), "", id="equal"),
        pytest.param(
            ("trainer.lr=0.02",), "settings: the run files differ (trainer.lr = ", id="lr"
        ),
        pytest.param(("run.seed=5",), "sampling seed: ", id="seed"),
        pytest.param(
            ("model.path=other",),
            "weights: the inputs are equal, but the weights differ",
            id="tower",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_cause_of_a_difference_is_named(
    home: Path, first: Path, words: tuple[str, ...], cause: str
) -> None:
    second = play(home, *words)
    found = sightline("bisect", first, second, cwd=home, check=False)
    if not cause:
        assert found.stdout == "no difference in 2 steps\n" and found.returncode == 0
        return
    place, *values, last = found.stdout.splitlines()
    assert found.returncode == 1 and last.startswith(f"cause: {cause}"), found.stdout
    assert len(values) == 2
    wanted = "step 1: digest" if "lr" in words[0] else "step 1, trace g0.0, token "
    assert place.startswith(f"first difference: {wanted}")
