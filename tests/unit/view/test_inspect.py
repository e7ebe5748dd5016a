"""`sightline inspect` counts what a run sent, and finds what it must not contain."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from making import samples
from synthetic_run import SyntheticSize, build_scores, write_synthetic_run

from sightline.cli.main import main
from sightline.config import RunFile, dump_toml
from sightline.config.load import load_config
from sightline.errors import WireError
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.inspect import find_eager_tensors, inspect_run, read_packs
from sightline.wire.array import Array
from sightline.wire.sample import Batch, digest_batch


def write_batch(run_dir: RunDir, raw: bytes, step: int = 1) -> None:
    run_dir.batch(step).write_bytes(raw)
    with run_dir.ledger.open("a") as file:
        file.write(json.dumps({"step": step, "batch": digest_batch(raw)}) + "\n")


@pytest.fixture
def run_dir(tmp_path: Path, tiny_model: Path) -> RunDir:
    """A run of one step whose batch is kept."""
    new_run_dir = RunDir(tmp_path / "run")
    new_run_dir.make()
    values = {
        "model": {"path": str(tiny_model)},
        "env": {"name": "color_codeword"},
        "trainer": {"micro_batch_tokens": 200},
    }
    new_run_dir.config.write_text(dump_toml(RunFile.model_validate(values)))
    drawn = samples(tiny_model, MediaStore(new_run_dir.media), count=6)
    batch = Batch(1, [msgspec.structs.replace(sample, advantages=None) for sample in drawn])
    write_batch(new_run_dir, batch.to_bytes())
    return new_run_dir


def test_clean_run_has_only_references(run_dir: RunDir) -> None:
    report = inspect_run(run_dir)
    batch = Batch.from_bytes(run_dir.batch(1).read_bytes())
    digests = {item.ref.digest for sample in batch.samples for item in sample.items}
    assert report.is_clean and report.batches_as_sent == 1 and report.batches_rebuilt == 0
    assert report.samples == 6 and report.distinct_files == len(digests) > 1
    assert report.slots == sum(len(sample.slots) for sample in batch.samples)
    assert 1 < report.micro_batches_with_references <= report.micro_batches
    assert report.descriptors >= report.distinct_files


def test_missing_image_file_is_reported_by_the_command(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run_dir.path)]) == 0
    assert "missing files" in capsys.readouterr().out
    item = Batch.from_bytes(run_dir.batch(1).read_bytes()).samples[0].items[0]
    (gone,) = (path for path in run_dir.media.rglob("*") if item.ref.digest in path.name)
    gone.unlink()
    assert main(["inspect", str(run_dir.path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing_files"] == 1


def test_a_data_url_in_a_log_is_found(run_dir: RunDir) -> None:
    (run_dir.logs / "worker-0.log").write_text("GET data:image/png;base64,iVBORw0KGgo=\n")
    report = inspect_run(run_dir)
    assert report.data_urls >= 1 and not report.is_clean


def test_pixels_in_a_batch_are_counted_or_refused(run_dir: RunDir) -> None:
    raw = msgspec.msgpack.decode(run_dir.batch(1).read_bytes())
    pixels = msgspec.to_builtins(Array.of(np.zeros((4, 1536)), "float32"), builtin_types=(bytes,))
    raw["samples"][0]["pixel_values"] = pixels
    assert list(find_eager_tensors(raw)) == ["samples[0].pixel_values"]
    run_dir.ledger.unlink()
    write_batch(run_dir, msgspec.msgpack.encode(raw))
    with pytest.raises(WireError, match=r"samples\[0\].pixel_values"):
        inspect_run(run_dir)


def test_modified_batch_is_refused(run_dir: RunDir) -> None:
    batch = Batch.from_bytes(run_dir.batch(1).read_bytes())
    run_dir.batch(1).write_bytes(Batch(1, batch.samples[:-1]).to_bytes())
    with pytest.raises(WireError, match="step 1"):
        inspect_run(run_dir)


@pytest.mark.parametrize("folder", ["traces", "scores"])
def test_pruned_file_is_named(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    run_dir.batch(1).unlink()
    other = run_dir.scores_of(1) if folder == "traces" else run_dir.traces_of(1)
    other.touch()
    assert main(["inspect", str(run_dir.path)]) == 2
    assert f"{folder}/step_000001.msgpack is missing" in capsys.readouterr().err


def test_removed_batch_is_rebuilt_with_the_traces_that_it_trained_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = write_synthetic_run(tmp_path / "run", SyntheticSize(3, 4, 2, 2, 2))
    values = {"model": {"path": str(tiny_model)}, "env": {"name": "color_codeword"}}
    values["orchestrator"] = {"replay_groups": 1, "replay_max_age": 2}
    run_dir.config.write_text(dump_toml(RunFile.model_validate(values)))
    earlier = [trace for trace in read_traces(run_dir.traces_of(1)) if trace.reward is not None]
    own = [trace for trace in read_traces(run_dir.traces_of(3)) if trace.reward is not None]
    run_dir.scores_of(3).write_bytes(build_scores(3, [*own, *earlier]).to_bytes())
    run_dir.ledger.write_text('{"step": 3, "batch": "removed"}\n')
    (batch,) = (batch for batch, *_ in read_packs(run_dir, load_config(RunFile, run_dir.config)))
    assert {sample.trace_id for sample in batch.samples} == {t.id for t in [*own, *earlier]}
    values["orchestrator"] = {"replay_groups": 1, "replay_max_age": 1}
    run_dir.config.write_text(dump_toml(RunFile.model_validate(values)))
    with pytest.raises(WireError, match="files of steps 2 to 3"):
        inspect_run(run_dir)
