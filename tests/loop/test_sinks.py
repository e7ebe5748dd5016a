"""A whole run with sinks: what arrives in them, and that a run does not depend on one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loop.jobs import ledger
from sightline.families.registry import write_tiny
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

STEPS = 3
# One rollout at a time: then what the server computes together is the same in every run, and so
# is the last bit of it.
RUN = f"""
[run]
name = "fed"
steps = {STEPS}
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[rollout]
max_tokens = 8
max_in_flight = 1
[orchestrator]
groups_per_step = 2
group_size = 3
max_lag = 0
[trainer]
lr = 2e-3
[eval]
tasks = 0
[inference]
max_num_seqs = 8
max_model_len = 256
[logging]
samples_every = 2
wandb_offline = true
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("fed")
    shutil.copy(Path(__file__).with_name("vowels.py"), home)
    (home / "run.toml").write_text(RUN)
    write_tiny("qwen_vl", home / "models" / "tiny", seed=0)
    return home


def play(home: Path, *overrides: str, **variables: str) -> tuple[RunDir, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sightline", "rl", "--plain", "run.toml", *overrides],
        cwd=home, capture_output=True, text=True, timeout=500,
        env=os.environ | {"HOME": str(home)} | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = next(line for line in done.stdout.splitlines() if line.startswith("run: "))
    return RunDir(home / run.removeprefix("run: ")), done.stdout


@pytest.fixture(scope="module")
def plain(home: Path) -> RunDir:
    """The run without a sink."""
    return play(home)[0]


def learnt(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """What steps came to, but for what a clock says."""
    names = ("loss", "grad_norm", "entropy", "mismatch_kl")
    trained = by_step(read_events(run_dir.metrics), "train")
    stepped = by_step(read_events(run_dir.metrics), "step")
    return {
        step: {name: event.values[name] for name in names}
        | {"reward": stepped[step].values["reward"]}
        for step, event in trained.items()
    }


def test_every_sink_is_fed_by_a_run_that_is_the_same_without(home: Path, plain: RunDir) -> None:
    sinks = 'logging.sinks=["tensorboard","wandb","trackio"]'
    run_dir, said = play(home, sinks, "logging.otel=file", TRACKIO_DIR=str(home / "trackio"))
    assert "sink " not in said
    assert ledger(run_dir) == ledger(plain) and learnt(run_dir) == learnt(plain)
    lines = (run_dir.logs / "sinks.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("sink ")] == [
        "sink tensorboard: fed", "sink wandb: fed", "sink trackio: fed",
    ]  # fmt: skip

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir.sinks / "tensorboard"))
    found.Reload()
    rewards = {scalar.step: scalar.value for scalar in found.Scalars("reward")}
    assert rewards == pytest.approx({s: values["reward"] for s, values in learnt(plain).items()})
    assert found.Images("samples/0/0")[0].encoded_image_string.startswith(b"\x89PNG")
    (log,) = (run_dir.sinks / "wandb").glob("offline-run-*/*.wandb")
    assert log.stat().st_size > 1000
    assert list((run_dir.sinks / "wandb").glob("offline-run-*/files/media/images/*.png"))
    assert list((home / "trackio").rglob("sightline*.db"))
    check_spans(run_dir)


def check_spans(run_dir: RunDir) -> None:
    """Every rollout of the run is a tree of its own, through a worker and the server."""
    spans = {
        span["spanId"]: span
        for line in run_dir.spans.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    names = Counter(span["name"] for span in spans.values())
    played = sum(1 for file in run_dir.traces.glob("*.msgpack") for _ in read_traces(file))
    assert names["rollout"] == played == len({span["traceId"] for span in spans.values()})
    assert names["turn"] == names["serve"] == names["decode"] == 2 * played
    above = {"turn": "rollout", "generate": "turn", "serve": "generate", "decode": "serve"}
    for span in spans.values():
        if span["name"] in above:
            parent = spans[span["parentSpanId"]]
            assert (parent["name"], parent["traceId"]) == (above[span["name"]], span["traceId"])
