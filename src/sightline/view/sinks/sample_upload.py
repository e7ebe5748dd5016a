"""Upload `samples/step_N.parquet` to an object store, while the run goes on."""

from __future__ import annotations

from sightline.media.object_remote import ObjectRemote
from sightline.media.remote import DEADLINE_S, TIMEOUT_S
from sightline.run.run_dir import RunDir
from sightline.view.parquet_export import export_samples
from sightline.view.sinks import RolloutRow, RunIdentity


class SampleUpload:
    def __init__(self, run_dir: RunDir, address: str, run: RunIdentity) -> None:
        self._run_dir, self._folder = run_dir, run.unique_name
        self._remote = ObjectRemote(address, TIMEOUT_S, DEADLINE_S)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Ignore metrics: only samples are uploaded."""

    def samples(self, step: int, samples: list[RolloutRow]) -> None:
        for name, _ in export_samples(self._run_dir, [step]):
            self._remote.upload(f"{self._folder}/{name}", self._run_dir.samples / name)

    def close(self) -> None:
        """Do nothing: every upload has ended."""
