"""A run directory as a killed run leaves it, in a few kilobytes, written by the code of a run.

Step 3 is made, step 2 is trained and has a checkpoint: the batch of step 3 waits. Nothing is
computed. `python tests/tiny_run.py` writes it into tests/golden/run_dirs under this version, where
later versions have to read it: it is not written again once its version is released.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from synthetic_run import SyntheticSize, write_synthetic_run

import sightline
from sightline.compute.tensor_file import write_tensors
from sightline.compute.weights import write_weights
from sightline.config import RunFile, dump_checked_toml
from sightline.launch.claim import SECRET_VARIABLE, make_secret, record_model_digests
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.run_state import RunState, eval_key
from sightline.run import RunDir
from sightline.trace import flatten, read_traces, write_traces
from sightline.trainer.checkpoint import CheckpointManifest, CheckpointStore, Ledger
from sightline.trainer.ranks import SINGLE_RANK
from sightline.trainer.snapshot import ShardSnapshot
from sightline.wire.sample import Batch

GOLDEN = Path(__file__).resolve().parent / "golden" / "run_dirs"
SIZE = SyntheticSize(steps=3, rollouts_per_step=4, images=2, conversations=2, group_size=2)
STEP, TRAINED = 3, 2


def write_run(path: Path, model: str = "") -> RunDir:
    """`model` is the path in the settings. The folder itself is the run's `checkpoint`."""
    run_dir = write_synthetic_run(path, SIZE)
    folder = path / "checkpoint"
    (folder / "config.json").write_text('{"model_type": "none"}')
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3)}
    write_tensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    settings = {"model": {"path": model or str(folder)}, "env": {"name": "color_codeword"},
                "run": {"steps": 9, "name": "tiny"}, "eval": {"every": 2}}  # fmt: skip
    run_dir.config.write_text(dump_checked_toml(RunFile.model_validate(settings)))
    record_model_digests(run_dir, folder)
    run_dir.verdicts.unlink()
    run_dir.make()
    make_secret(run_dir)

    run_state = RunState.open(run_dir)
    announced = []
    for step in range(1, STEP + 1):
        traces = list(read_traces(run_dir.traces_of(step)))
        scored = [trace for trace in traces if trace.reward is not None]
        samples = [sample for trace in scored for sample in flatten(trace, lambda node: 1.0)]
        ids = {"train": [trace.id for trace in scored]}
        announced.append(
            run_state.write_step(Batch(step, samples), traces, ids, 2 * step, {2 * step: 2 * step})
        )
    ledger = Ledger(run_dir.ledger, 0)
    for ready in announced[:TRAINED]:
        ledger.add(ready.step, ready.digest)
    make_secret(run_dir)
    manifest, _ = write_weights(run_dir.weights, tensors, TRAINED, 0, run=run_dir.read_id())
    checkpoints = CheckpointStore(run_dir.checkpoints, keep=2)
    part = checkpoints.part(TRAINED)
    part.mkdir()
    state = {f"model/{name}": tensor for name, tensor in tensors.items()}
    snapshot = ShardSnapshot(state, {name: (0, len(tensor)) for name, tensor in state.items()})
    files = snapshot.write(part, f"rank_{SINGLE_RANK.rank:03d}")
    checkpoints.complete(CheckpointManifest(TRAINED, 0, files))
    best = BestCheckpoint(folder, run_dir.checkpoints / "best", run_state)
    run_state.progress.best_digest = best._write(manifest.parent)
    run_state.progress.best_step, run_state.progress.best_measure = TRAINED, 0.5
    run_state.record_eval("step", TRAINED, 0.5)
    write_traces(run_dir.eval_traces(eval_key("step", TRAINED)), traces)
    run_state.remove_covered_batches(TRAINED)
    run_state.save()
    run_dir.summary.write_text(json.dumps({"steps": TRAINED, "stopped_by": "a signal"}))
    return run_dir


if __name__ == "__main__":
    target = GOLDEN / sightline.__version__
    if target.exists():
        sys.exit(f"{target} is there already, and stays as it is")
    os.environ[SECRET_VARIABLE] = "the-secret-of-a-golden-run-opens-nothing"
    write_run(target, model="checkpoint")
    shutil.rmtree(target / "report", ignore_errors=True)
    print(sum(file.stat().st_size for file in target.rglob("*") if file.is_file()), "bytes")
