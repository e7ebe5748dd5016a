"""This version can read and resume run directories of every version.

`python tests/tiny_run.py` wrote each with the code of its version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_run
from fastapi.testclient import TestClient

from sightline.cli.main import main
from sightline.config import RunFile, load_config
from sightline.launch.claim import check_model_unchanged, read_secret
from sightline.media import MediaStore
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.run_state import RunState
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.trainer.checkpoint import CheckpointStore, Ledger, open_shards
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import build_app
from sightline.view.report import write_report
from sightline.view.run_status import get_status
from sightline.wire.micro_batch import StepScores
from sightline.wire.sample import Batch
from tests.read_back import read_weights

VERSIONS = sorted(path.name for path in tiny_run.GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    shutil.copytree(tiny_run.GOLDEN / request.param, tmp_path / "tiny-001")
    return RunDir(tmp_path / "tiny-001")


def test_golden_run_can_be_resumed(golden: RunDir) -> None:
    config = load_config(RunFile, golden.config)
    assert (config.run.steps, config.eval.every) == (9, 2)
    check_model_unchanged(golden, golden.path / "checkpoint")
    run_state = RunState.open(golden)
    assert (run_state.progress.step, run_state.progress.next_group) == (3, 6)
    [ready] = run_state.announcements_after(tiny_run.TRAINED)
    batch = Batch.from_bytes(ready.data)
    assert batch.step == 3 and batch.samples
    store = MediaStore(golden.media)
    assert all(store.get(item.ref) for sample in batch.samples for item in sample.items)
    Ledger(golden.ledger, tiny_run.TRAINED).add(3, ready.digest)
    chosen = CheckpointStore(golden.checkpoints, 2).choose()
    assert chosen.path is not None and (chosen.step, chosen.refused) == (2, [])
    assert open_shards(chosen.path).full("model/a.weight").flatten().tolist() == [0, 1, 2, 3, 4, 5]
    manifest, tensors = read_weights(golden.weights / "v000002" / "manifest.json")
    assert manifest.version == 2 and tensors["a.weight"].shape == (2, 3)
    assert manifest.run == golden.read_id() and read_secret(golden)
    source, best = golden.path / "checkpoint", golden.checkpoints / "best"
    assert not BestCheckpoint(source, best, run_state).find_problem()


def test_every_reader_shows_the_golden_run(
    golden: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(list(read_traces(golden.traces_of(1)))) == 4
    assert StepScores.from_bytes(golden.scores_of(1).read_bytes()).step == 1
    status = get_status(golden)
    assert (status.command, status.steps_total) == ("rl", 9)
    assert main(["status", str(golden.path)]) == 0 and main(["ls", str(golden.path.parent)]) == 0
    assert main(["trace", "export", str(golden.traces_of(3))]) == 0
    assert "color_codeword" in write_report(golden).read_text()
    with TestClient(build_app(RunCollection([golden.path])), base_url="http://localhost") as web:
        [runs_page] = web.get("/api/runs").json()
    assert runs_page["env"] == "color_codeword"
