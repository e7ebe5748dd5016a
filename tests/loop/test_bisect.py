"""`sightline bisect` and `recompute` on runs that were played: equal ones, and ones with a planted
cause."""

from __future__ import annotations

import re
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
checkpoint_every = 1
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


def recompute(home: Path, run: Path, step: int, *words: str) -> dict[str, list[str]]:
    """Return the cells of the table, by the row's name."""
    command = ("recompute", run, "--step", str(step), "--tokens", "0", *words)
    lines = sightline(*command, cwd=home).stdout.splitlines()
    rows = [re.split(" {2,}", line.strip()) for line in lines[2:]]
    return {name: cells for name, *cells in rows}


def test_step_is_computed_again_from_its_traces(home: Path, first: Path) -> None:
    """In exact mode, to the bit: the packs are the same."""
    for step in (1, 2):
        rows = recompute(home, first, step)
        assert rows["largest difference of a logprob"][1] == "0"
        assert rows["mismatch KL"][1] == "0"
        for name in ("loss", "gradient norm"):
            assert rows[name][0] == rows[name][1]


@pytest.mark.parametrize(
    ("words", "moved", "logprobs_move"),
    [
        pytest.param(["trainer.lr=0.02"], {"learning rate"}, False, id="lr"),
        pytest.param(["algorithm.kl_coef=5"], {"loss", "gradient norm", "entropy"}, False, id="kl"),
        pytest.param(["model.path=other"], {"loss", "gradient norm", "entropy"}, True, id="tower"),
    ],
)
def test_effect_of_a_setting_on_a_step_is_shown(
    home: Path, first: Path, words: list[str], moved: set[str], logprobs_move: bool
) -> None:
    rows = recompute(home, first, 1 if logprobs_move else 2, *words)
    named = {"loss", "gradient norm", "learning rate", "entropy"} & rows.keys()
    differing = {name for name in named if rows[name][1] != rows[name][2]}
    assert differing and differing <= moved
    assert (rows["largest difference of a logprob"][2] != "0") == logprobs_move
    is_parallel = rows["cosine with the gradient again"][2] == "1.000000"
    assert is_parallel == (moved == {"learning rate"})


def test_missing_checkpoint_names_the_setting_that_keeps_it(
    home: Path, first: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(first, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "step_000001")
    refused = sightline("recompute", copy, "--step", "2", cwd=home, check=False)
    assert refused.returncode == 2
    assert "trainer.keep_checkpoints_every=1" in refused.stderr
    refused = sightline("recompute", copy, "--step", "1", "env.name=other", cwd=home, check=False)
    assert "env.name=other does not change how a step is computed" in refused.stderr
