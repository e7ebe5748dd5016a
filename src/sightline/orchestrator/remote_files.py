"""The run directory for processes on machines that do not see it: what they need of it, and what
they write into it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from sightline.errors import WireError
from sightline.media import MediaStore
from sightline.media.stored_file import store_file
from sightline.run import RunDir
from sightline.run.mirror import APPENDED, MAX_INLINE_BYTES, write_file
from sightline.wire.control import FileChange, FileChanges

WEIGHTS = (".safetensors", ".bin", ".pt")
TRAINER_READS = ("ledger.jsonl", "weights/history.jsonl", "checkpoints/step_*/*")
TRAINER_WRITES = (
    *APPENDED, *TRAINER_READS, "weights/v*/manifest.json", "scores/step_*.msgpack",
    "checkpoints/final/*", "logs/trainer*",
)  # fmt: skip


@dataclass(frozen=True)
class RemoteFiles:
    run_dir: RunDir
    model: Path
    """The folder of the checkpoint that the run began with."""
    blobs: MediaStore
    """Carries what is large."""

    _model_files: dict[Path, FileChange] = field(default_factory=dict)
    """Of the checkpoint, once somebody has asked for them: its files do not change."""

    def collect(self, peer: str) -> FileChanges:
        """What the process called `peer` works on."""
        return FileChanges(tuple(self._iter_files(peer)))

    def _iter_files(self, peer: str) -> Iterator[FileChange]:
        for path in (self.run_dir.config, self.run_dir.id_file):
            yield FileChange(path.name, path.read_bytes())
        for path in sorted(self.model.iterdir()):
            needs_it = not peer.startswith("worker") or path.suffix not in WEIGHTS
            if path.is_file() and not path.name.startswith(".") and needs_it:
                if path not in self._model_files:
                    name = f"model/{self.model.name}/{path.name}"
                    self._model_files[path] = self._read(name, path)
                yield self._model_files[path]
        if peer.startswith("trainer"):
            for pattern in TRAINER_READS:
                for path in sorted(self.run_dir.path.glob(pattern)):
                    # Each is asked for once, and its parts go then.
                    name = str(path.relative_to(self.run_dir.path))
                    yield self._read(name, path, secrets.token_bytes(16))

    def _read(self, name: str, path: Path, salt: bytes = b"") -> FileChange:
        if path.stat().st_size <= MAX_INLINE_BYTES:
            return FileChange(name, path.read_bytes())
        return FileChange(name, stored=store_file(self.blobs, path, salt=salt))

    def write(self, peer: str, written: FileChanges) -> None:
        """Does to the run directory what `peer` did to its copy."""
        for file in written.files:
            is_trainer = peer == "trainer"
            allowed = TRAINER_WRITES if is_trainer else (f"logs/{peer}.*",)
            # What is stored is removed there once it is here: that is not for everybody to ask.
            is_small = file.stored is None and not file.is_removed
            is_allowed = any(fnmatch(file.name, pattern) for pattern in allowed)
            if not is_allowed or not (is_trainer or is_small):
                raise WireError(
                    f"{peer} sent {file.name[:100]!r}, which is not its to write",
                    "this is a bug, or no process of this run; report it",
                )
            write_file(self.run_dir.path, file, self.blobs)


class WriteQueue:
    """Writes in a thread, one file after the other, while its owner goes on."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self.num_waiting = 0

    def put(self, write: Callable[[], None]) -> None:
        self.num_waiting += 1
        self._queue.put_nowait(write)

    async def join(self) -> None:
        """Returns when all that was put is written."""
        await self._queue.join()

    async def keep_writing(self) -> None:
        while True:
            await asyncio.to_thread(await self._queue.get())
            self.num_waiting -= 1
            self._queue.task_done()
