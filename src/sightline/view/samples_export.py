"""Write the rollouts of a run's steps to parquet files in the run directory."""

from __future__ import annotations

from collections.abc import Iterator

from sightline.errors import ConfigError
from sightline.run.run_dir import RunDir
from sightline.view.parquet_export import MAX_ROLLOUT_BYTES, ExportCounts, export_step
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.verdicts import read_verdicts


def export_samples(
    run_dir: RunDir, steps: list[int] | None = None, max_rollout_bytes: int = MAX_ROLLOUT_BYTES
) -> Iterator[tuple[str, ExportCounts]]:
    """Yield the name and the counts of each file after it was written."""
    run_dir = get_run_dir(run_dir.path)
    files = sorted(run_dir.traces.glob("step_*.msgpack"))
    if steps:
        files = [run_dir.traces_of(step) for step in steps]
    store = RunFiles(run_dir).open_store()
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no {file}", "name a step that has traces")
        name = f"{file.stem}.parquet"
        verdicts = read_verdicts(run_dir, file.stem)
        target = run_dir.samples / name
        yield name, export_step(file, target, store, verdicts, max_rollout_bytes)
