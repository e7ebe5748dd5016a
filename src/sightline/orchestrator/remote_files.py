"""Send and receive files of the run directory, for processes on machines that do not share it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from sightline.errors import WireError
from sightline.media import MediaStore
from sightline.media.http_remote import derive_worker_token
from sightline.media.stored_file import store_file
from sightline.regular_file import read_bytes
from sightline.run import RunDir
from sightline.run.mirror import APPENDED, MAX_INLINE_BYTES, MEDIA_TOKEN, write_file
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
    """The checkpoint folder that the run started from."""
    blobs: MediaStore
    """Transfers large files."""
    media_token: str = field(default="", repr=False)
    """Token of the media service; empty if the images are elsewhere."""

    _model_files: dict[Path, FileChange] = field(default_factory=dict)
    """Cache of the checkpoint's files, which do not change."""

    def collect(self, peer: str) -> FileChanges:
        """Return the files that the process `peer` needs."""
        return FileChanges(tuple(self._iter_files(peer)))

    def _iter_files(self, peer: str) -> Iterator[FileChange]:
        for path in (self.run_dir.config, self.run_dir.id_file):
            yield FileChange(path.name, read_bytes(path))
        if self.media_token and peer.startswith("worker"):
            token = derive_worker_token(self.media_token, f"{self.run_dir.read_id()}-{peer}")
            yield FileChange(MEDIA_TOKEN, token.encode())
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
                    # Do not share parts: they are removed once the trainer has them.
                    name = str(path.relative_to(self.run_dir.path))
                    yield self._read(name, path, secrets.token_bytes(16))

    def _read(self, name: str, path: Path, salt: bytes = b"") -> FileChange:
        if path.stat().st_size <= MAX_INLINE_BYTES:
            return FileChange(name, read_bytes(path))
        return FileChange(name, stored=store_file(self.blobs, path, salt=salt))

    def write(self, peer: str, written: FileChanges) -> None:
        """Apply the changes that `peer` made to its copy of the run directory."""
        for file in written.files:
            is_trainer = peer == "trainer"
            allowed = TRAINER_WRITES if is_trainer else (f"logs/{peer}.*",)
            # Only the trainer may remove files or send files through the store.
            is_small = file.stored is None and not file.is_removed
            is_allowed = any(fnmatch(file.name, pattern) for pattern in allowed)
            if not is_allowed or not (is_trainer or is_small):
                raise WireError(
                    f"{peer} sent {file.name[:100]!r}, which it may not write",
                    "this is a bug. Report it",
                )
            write_file(self.run_dir.path, file, self.blobs)
