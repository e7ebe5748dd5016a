"""A run in a notebook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import SyntheticSize, write_synthetic_run

import sightline
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import by_step, read_events

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "examples" / "notebook" / "read_a_run.ipynb"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path = tmp_path_factory.mktemp("notebook") / "runs" / "color_codeword-001"
    path.parent.mkdir()
    return write_synthetic_run(
        path, SyntheticSize(steps=3, rollouts_per_step=20, images=6, conversations=12)
    )


def test_notebook_run_has_tables_traces_and_images(run_dir: RunDir) -> None:
    run = sightline.open_run(run_dir.path)
    events = by_step(read_events(run_dir.metrics), "step")
    assert run.metrics["reward"].to_dict() == {s: e.values["reward"] for s, e in events.items()}
    assert len(run.rollouts) == 60 and run.problems == []
    traces = list(run.traces(2))
    assert [t.id for t in traces] == [t.id for t in read_traces(run_dir.traces_of(2))]
    digest = run.images["digest"][0]
    assert run.image(digest).size == tuple(run.images.loc[0, ["width", "height"]])
    assert set(run.mismatch(fresh=False)["dimension"]) >= {"turn", "distance", "lag"}


def test_rollout_tokens_match_its_trace(run_dir: RunDir) -> None:
    run = sightline.open_run(run_dir.path)
    (rollout,) = run.find(limit=1, verdict="train")
    tokens = rollout.tokens
    ids = [i for node in rollout.trace.nodes for i in node.token_ids.numpy().tolist()]
    assert tokens["token_id"].tolist() == ids
    sampled = tokens[tokens["sampled"]]
    assert len(sampled) == rollout.trace.num_sampled
    ratio = np.exp(sampled["trainer"] - sampled["sampler"])
    assert np.allclose(sampled["ratio"], ratio, rtol=1e-5)
    assert tokens[~tokens["sampled"]]["trainer"].isna().all()


def test_documented_notebook_code_runs(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "samples.md").read_text()
    (text,) = re.findall(r"```python\n(import sightline\n.*?)```", page, re.S)
    monkeypatch.chdir(run_dir.path.parents[1])
    names: dict[str, Any] = {}
    exec(compile(text, "samples.md", "exec"), names)
    assert len(names["best"].tokens) and len(names["run"].metrics) == 3


EXECUTE = """
import json, sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
print(json.dumps([[list(o.get("data", {})) for o in c.get("outputs", [])] for c in book.cells]))
"""


@pytest.mark.browser
def test_the_example_notebook_runs_from_its_first_cell_to_its_last(run_dir: RunDir) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK)],
        capture_output=True, text=True, timeout=400, cwd=run_dir.path.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kinds = {kind for cell in json.loads(done.stdout.splitlines()[-1]) for o in cell for kind in o}
    assert {"text/html", "image/png"} <= kinds
