"""Samples as parquet: their contents and their cost."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from synthetic_run import SyntheticSize, write_synthetic_run

from sightline.cli.main import main
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trace import Trace, read_traces, write_traces
from sightline.view.parquet_export import Selection, export_samples, export_step


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path = tmp_path_factory.mktemp("export") / "run-001"
    return write_synthetic_run(
        path, SyntheticSize(steps=2, rollouts_per_step=20, images=6, conversations=12)
    )


def test_row_is_one_rollout_with_each_image_once(run_dir: RunDir) -> None:
    import pandas

    before = {f: f.read_bytes() for f in run_dir.path.rglob("*.msgpack")}
    done = dict(export_samples(run_dir))
    assert set(done) == {"step_000001.parquet", "step_000002.parquet"}
    frame = pandas.read_parquet(run_dir.samples / "step_000002.parquet")
    traces = list(read_traces(run_dir.traces_of(2)))
    assert frame["trace_id"].tolist() == [trace.id for trace in traces]
    assert set(frame["verdict"]) <= {"train", "no_signal", "stale", "broken"}
    store = MediaStore(run_dir.media)
    for trace, row in zip(traces, frame.itertuples(), strict=True):
        digests = {slot.item.ref.digest for node in trace.nodes for slot in node.slots}
        assert sorted(image["path"] for image in row.images) == sorted(digests)
        for image in row.images:
            assert image["bytes"] == store.get(store.get_ref(image["path"]))
        path = trace.path(trace.turns[-1].id)
        assert row.token_ids.tolist() == trace.tokens(path)
        assert int(np.sum(row.sampled)) == len(row.logprobs)
        assert json.loads(row.messages)[0]["role"] == "user"
    assert {f: f.read_bytes() for f in run_dir.path.rglob("*.msgpack")} == before


def test_best_rollouts_of_each_group_are_selected(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas

    traces = [trace for trace in read_traces(run_dir.traces_of(2)) if not trace.error]
    rewards: dict[str, list[float]] = {}
    for trace in traces:
        rewards.setdefault(trace.group_id, []).append(trace.reward or 0.0)
    assert max(map(len, rewards.values())) > 2
    list(export_samples(run_dir, [2], selection=Selection(best=2), folder=tmp_path / "best"))
    frame = pandas.read_parquet(tmp_path / "best" / "step_000002.parquet")
    found = {group: sorted(rows.reward) for group, rows in frame.groupby("group_id")}
    assert found == {group: sorted(values)[-2:] for group, values in rewards.items()}
    least = sorted(max(values) for values in rewards.values())[-1]
    list(export_samples(run_dir, [2], selection=Selection(1, least), folder=tmp_path / "good"))
    frame = pandas.read_parquet(tmp_path / "good" / "step_000002.parquet")
    assert len(frame) and set(frame.reward) == {least}
    words = ["samples", str(run_dir.path), "--min-reward", f"{least + 1}", "--to", str(tmp_path)]
    assert main(words) == 2 and "lower --min-reward" in capsys.readouterr().err


@pytest.mark.browser
def test_datasets_library_loads_the_export_with_images(run_dir: RunDir, tmp_path: Path) -> None:
    list(export_samples(run_dir, [1]))
    script = (
        "import sys, datasets\n"
        "rows = datasets.Dataset.from_parquet(sys.argv[1], cache_dir=sys.argv[2])\n"
        "assert isinstance(rows.features['images'].feature, datasets.Image), rows.features\n"
        "print(rows.num_rows, rows[0]['images'][0].size)"
    )
    file = run_dir.samples / "step_000001.parquet"
    done = subprocess.run(
        [sys.executable, "-c", script, str(file), str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first = next(read_traces(run_dir.traces_of(1))).nodes[0].slots[0].item.ref
    assert done.stdout.splitlines()[-1] == f"20 ({first.width}, {first.height})"


@pytest.mark.thorough
@pytest.mark.parametrize("size", ["nan", "-1", "inf"])
def test_invalid_image_limit_is_refused(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    words = ["samples", str(run_dir.path), "--to", str(tmp_path), f"--max-image-mb={size}"]
    assert main(words) == 2 and "is not a size" in capsys.readouterr().err


def test_export_memory_does_not_grow_with_size(tmp_path: Path) -> None:
    """Compare the peaks of Arrow and Python: six times the rollouts use about the same memory."""
    store = MediaStore(tmp_path / "media")
    noise = np.random.default_rng(0)
    base = write_synthetic_run(
        tmp_path / "run", SyntheticSize(steps=1, rollouts_per_step=10, images=4, conversations=4)
    )
    template = next(read_traces(base.traces_of(1)))
    pixels = noise.integers(0, 255, (400, 400, 3), dtype=np.uint8)

    def peak(count: int) -> tuple[int, int]:
        traces = []
        for i in range(count):
            pixels[0, 0] = (i % 256, i // 256, 7)
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "PNG", compress_level=0)  # noise is no smaller
            ref = store.put(encoded.getvalue())
            traces.append(with_image(template, f"t{i}", ref))
        file = tmp_path / f"step_{count:06d}.msgpack"
        write_traces(file, traces)
        pool = pyarrow.system_memory_pool()
        before = pool.bytes_allocated()
        pyarrow.set_memory_pool(pool)
        watcher = Peak(pool)
        del traces
        tracemalloc.start()
        with watcher:
            export_step(file, tmp_path / f"{count}.parquet", store, {})
        _, of_python = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return watcher.most - before, of_python

    small, large = peak(20), peak(120)
    inlined = sum(f.stat().st_size for f in store.root.rglob("*") if f.is_file())
    assert inlined > 50_000_000
    for few, many in zip(small, large, strict=True):
        assert many < 2 * few + 20_000_000 < inlined


class Peak:
    """Return the peak size of a pool, sampled often."""

    def __init__(self, pool: pyarrow.MemoryPool) -> None:
        self._pool, self.most, self._over = pool, 0, threading.Event()

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, self._pool.bytes_allocated())


def with_image(trace: Trace, name: str, ref: object) -> Trace:
    from msgspec.structs import replace

    from sightline.message import user

    node = trace.nodes[0]
    item = replace(node.slots[0].item, ref=ref)
    first = replace(node, message=user(ref), slots=(replace(node.slots[0], item=item),))
    return replace(trace, id=name, nodes=[first])
