"""Every model type plays and trains: a short run of each, with the embedded engine. With `FULL=1`
each also learns to see, and the table of docs/models.md is printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from shards import IS_FULL, take_first

from loop.jobs import EXAMPLES, sightline, summary
from sightline.families.registry import write_tiny
from sightline.run import RunDir
from sightline.view.events import by_step, read_events
from tests.contract.cases.anyvlm import write_kind

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

STEPS = 10 if IS_FULL else 3
WARMUP = """
[run]
name = "warmup"
steps = 2
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[sft]
output_dir = "models/warm"
batch_size = 4
"""
RUN = """
[run]
name = "types"
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 8
[orchestrator]
groups_per_step = 3
group_size = 4
max_lag = 1
# Every step has tokens of the trainer's own version, to measure the mismatch on.
diagnostics_every = 1
[trainer]
lr = 2e-3
[eval]
tasks = 4
[inference]
max_num_seqs = 32
max_model_len = 256
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder to run in, where the environment can be imported."""
    shutil.copy(Path(__file__).with_name("vowels.py"), tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "warmup.toml").write_text(WARMUP)
    return tmp_path


def play(home: Path, *overrides: str) -> str:
    """Play a run to its end, and return its output."""
    words = ("rl", "--plain", "run.toml", f"run.steps={STEPS}", *overrides)
    output = sightline(*words, cwd=home).stdout
    run_dir = RunDir(home / output.strip().splitlines()[-2].removeprefix("run: "))
    run_summary = summary(run_dir)
    assert run_summary["steps"] == STEPS and run_summary["reward_final"] is not None
    trained = by_step(read_events(run_dir.metrics), "train")
    mismatches = [trained[step].values["mismatch_kl"] for step in range(1, STEPS + 1)]
    print(f"seconds {run_summary['seconds']:.0f}, mismatch KL by step {mismatches}")
    assert all(kl is not None and kl < 1e-5 for kl in mismatches)
    return output


def test_a_recurrent_model_warms_up_and_trains(home: Path) -> None:
    sightline("model", "tiny", "models/tiny", "--type", "qwen3_5", cwd=home)
    sightline("sft", "warmup.toml", cwd=home)
    output = play(home, "model.path=models/warm")
    assert re.search(r"packing: trees .* carry a state", output)
    assert "prefix cache: on, " in output


KINDS = [("qwen_vl", "qwen2_5_vl"), ("qwen_vl", "qwen3_vl_thinking"), ("glm_v", "glm46v")]


@pytest.mark.parametrize(("family", "kind"), take_first(KINDS, 1))
def test_model_type_trains(home: Path, family: str, kind: str) -> None:
    write_tiny(family, home / "models" / "tiny", seed=0, type=kind)
    assert "prefix cache: on, " in play(home)


PLAIN = [
    "gemma3", "gemma4", "mistral3", "smolvlm", "llava", "idefics3", "internvl", "qwen2_vl",
]  # fmt: skip
ON_TORCHVISION = [
    pytest.param(kind, marks=pytest.mark.torchvision) for kind in ("lfm2_vl", "llama4")
]


@pytest.mark.parametrize("kind", [*take_first(PLAIN, 1), *take_first(ON_TORCHVISION, 1)])
def test_generic_family_type_trains(home: Path, kind: str) -> None:
    write_kind(kind, home / "models" / "tiny")
    output = play(home)
    assert ("packing: padded rows" in output) == ("prefix cache: off, " in output)


# A square that each tower sees as few patches, none of them padded.
SEES = {"qwen2_vl": 28, "mistral3": 28}

if IS_FULL:

    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("kind", [*PLAIN, *ON_TORCHVISION])
    def test_generic_family_type_learns_to_see(tmp_path: Path, kind: str) -> None:
        write_kind(kind, tmp_path / "models" / "tiny")
        side = f"env.args.side={SEES.get(kind, 32)}"
        sightline("sft", EXAMPLES / "warmup.toml", side, cwd=tmp_path)
        words = ("rl", "--plain", EXAMPLES / "cpu.toml", side, "inference.max_model_len=512")
        words += ("run.steps=40", "eval.tasks=256")
        said = sightline(*words, cwd=tmp_path, timeout_s=3000).stdout
        run_dir = RunDir(tmp_path / said.strip().splitlines()[-2].removeprefix("run: "))
        found = summary(run_dir)
        print(
            f"| {kind} | {found['reward_start']:.2f} | {found['reward_final']:.2f} | "
            f"{found['steps']} | {found['seconds']:.0f} s | {found['mismatch_kl']:.1e} |"
        )
        assert found["mismatch_kl"] < 1e-5
        assert found["reward_final"] > found["reward_start"] + 0.1
