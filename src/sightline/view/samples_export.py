"""Exports the steps of a run, into its own folder or to an address."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sightline.errors import ConfigError
from sightline.run.run_dir import RunDir
from sightline.view.parquet_export import MAX_ROLLOUT_BYTES, ExportCounts, export_step
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.upload import build_upload_url, upload
from sightline.view.verdicts import read_verdicts


def export_samples(
    run_dir: RunDir,
    steps: list[int] | None = None,
    to: str | None = None,
    headers: Mapping[str, str] | None = None,
    max_rollout_bytes: int = MAX_ROLLOUT_BYTES,
) -> Iterator[tuple[str, ExportCounts]]:
    """Name and counts of each file that was written or uploaded, as it is done."""
    run_dir = get_run_dir(run_dir.path)
    files = sorted(run_dir.traces.glob("step_*.msgpack"))
    if steps:
        files = [run_dir.traces_of(step) for step in steps]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"there is no {file}", "name a step that has traces")
    if to is not None and len(files) > 1 and build_upload_url(to, "x") == to:
        raise ConfigError(
            f"{len(files)} files and one address", "name one --step, or end the address in a slash"
        )
    store = RunFiles(run_dir).open_store()
    for file in files:
        name = f"{file.stem}.parquet"
        verdicts = read_verdicts(run_dir, file.stem)
        if to is None:
            yield (
                name,
                export_step(file, run_dir.samples / name, store, verdicts, max_rollout_bytes),
            )
            continue
        # Removed however the upload ends.
        with tempfile.TemporaryDirectory(prefix="sightline-export-") as scratch:
            target = Path(scratch) / name
            found = export_step(file, target, store, verdicts, max_rollout_bytes)
            upload(target, build_upload_url(to, name), headers)
        yield name, found


def export_command(args: argparse.Namespace) -> None:
    """What `sightline samples` does: exports, and prints a line for each file."""
    headers = {}
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon:
            raise ConfigError(f"--header {header!r}", "write it NAME:VALUE")
        headers[name.strip()] = value.strip()
    most = int(args.max_image_mb * 1e6)
    for name, found in export_samples(RunDir(args.run_dir), args.step, args.to, headers, most):
        print(
            f"{name}: {found.rollouts} rollouts, {found.images} images, {found.nbytes:,} bytes"
            + (f", {found.left_out} images left out" if found.left_out else "")
            + (f", {len(found.problems)} traces not read" if found.problems else ""),
            flush=True,
        )
