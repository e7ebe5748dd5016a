"""A copy of the run directory on a machine that cannot access the original.

    process --JoinRequest--> orchestrator --FileChanges--> process: its own folder
    process --FileChanges--> orchestrator      before every message that relies on the files

The orchestrator owns the run directory. Small files are sent over the channel, in order. Large
files are sent as parts through the image store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from sightline.errors import ProcessFailed, SightlineError, WireError
from sightline.media import MediaStore
from sightline.media.files import sync_directory
from sightline.media.stored_file import fetch_file, store_file
from sightline.regular_file import open_file, read_bytes
from sightline.run.run_dir import RunDir
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import FileChange, FileChanges, JoinRequest
from sightline.wire.file import append_line, write_atomic
from sightline.wire.weights import MANIFEST

COPIED = ".copied"
"""Marker file in a copy of a run directory."""
JOIN_TIMEOUT_S = 600.0
"""Time limit for the orchestrator's answer. It may have to store a large checkpoint first."""
MAX_INLINE_BYTES = 1 << 20
"""Larger files are sent through the store."""
FLUSH_EVERY_S = 1.0
BEAT = ".beat"
"""Suffix of heartbeat files."""
APPENDED = ("metrics.jsonl",)
"""Files to which several processes append."""
PUBLISHED = "weights/*.safetensors"
"""Published weights, which are stored separately."""
MEDIA_TOKEN = "media_token"
"""File in a worker's copy: its own token of the media service."""
OWN = ("model", "media", "batches", "secret", "config.toml", "run_id", MEDIA_TOKEN)
"""Files in a copy that are never sent."""


def join(name: str, hub: str, key: str) -> tuple[FileChange, ...]:
    """Return the files that the orchestrator at `hub` has for the process `name`."""
    spoke, deadline = Spoke(hub, name, key), time.monotonic() + JOIN_TIMEOUT_S
    try:
        spoke.send(control.encode(JoinRequest(get_release())))
        while (data := spoke.receive(max(0.0, deadline - time.monotonic()))) is not None:
            message = control.decode_from("orchestrator", data)
            if isinstance(message, FileChanges):
                return message.files
            # Other messages are for the process that this one replaces, and will be repeated.
    finally:
        spoke.close()
    raise ProcessFailed(
        f"{hub} did not answer {name} within {JOIN_TIMEOUT_S:.0f} s",
        "check that this machine can reach [launch] address, and that both have the same secret",
    )


def write_file(root: Path, file: FileChange, blobs: MediaStore | None) -> None:
    """Apply a change to the folder `root`."""
    path = root / _check_name(file.name)
    if file.is_removed:
        path.unlink(missing_ok=True)
        if path.parent != root and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
        return
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent.parent)
    if file.stored is not None:
        assert blobs is not None
        fetch_file(blobs, file.stored, path, {})
        if file.stored.salt:
            for part in file.stored.parts:
                blobs.remove(part)
    elif file.is_appended:
        append_line(path, file.data.removesuffix(b"\n"))
    else:  # a heartbeat need not survive a crash
        write_atomic(path, file.data, sync=path.suffix != BEAT)


def _check_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise WireError(f"{name[:100]!r} is not a file of a run", "this is a bug. Report it")
    return name


def is_copy(run_dir: RunDir) -> bool:
    return (run_dir.path / COPIED).exists()


class RunMirror:
    """Sends changes in a copy of the run directory: either checkpoints or all other files."""

    def __init__(
        self,
        run_dir: RunDir,
        send: Callable[[FileChanges], None],
        blobs: MediaStore,
        every_s: float = FLUSH_EVERY_S,
        of_checkpoints: bool = False,
    ) -> None:
        self._root, self._send, self._blobs = run_dir.path, send, blobs
        self._every_s, self._of_checkpoints = every_s, of_checkpoints
        self._seen = {name: _get_stamp(path) for name, path in self._iter_files()}
        self._lengths = {name: stamp[1] for name, stamp in self._seen.items()}
        self._lock = threading.Lock()
        # Regularly, so that metrics and errors arrive while no messages are sent.
        for action in () if of_checkpoints else (self.flush, self.send_heartbeats):
            threading.Thread(
                target=self._repeat, args=(action,), daemon=True, name="mirror"
            ).start()

    def flush(self) -> None:
        """Send all changes so far, in order."""
        with self._lock:
            stamps = {name: _get_stamp(path) for name, path in self._iter_files()}
            if not (self._root / COPIED).exists():
                return  # the whole copy is being removed
            new = [name for name, stamp in stamps.items() if self._seen.get(name) != stamp]
            # A manifest makes the files next to it valid, so send it after them.
            new.sort(key=lambda name: (name.endswith(MANIFEST), name))
            removed = [name for name in self._seen if name not in stamps]
            removed.sort(key=lambda name: (not name.endswith(MANIFEST), name))
            files = []
            for name in new:
                try:
                    files.append(self._read(name))
                except FileNotFoundError:  # it has just been removed
                    del stamps[name]
            files += [FileChange(name, is_removed=True) for name in removed]
            if files:
                self._send(FileChanges(tuple(files)))
            self._seen = stamps
            for file in files:
                if file.is_appended:
                    self._lengths[file.name] = self._lengths.get(file.name, 0) + len(file.data)

    def is_behind(self) -> bool:
        """Return whether there are unsent changes."""
        return {name: _get_stamp(path) for name, path in self._iter_files()} != self._seen

    def send_heartbeats(self) -> None:
        """Send the heartbeats, without waiting for large files."""
        for path in (self._root / "logs").glob(f"[!.]*{BEAT}"):
            with contextlib.suppress(FileNotFoundError):  # it has just been replaced
                self._send(FileChanges((FileChange(f"logs/{path.name}", read_bytes(path)),)))

    def _read(self, name: str) -> FileChange:
        path = self._root / name
        if name in APPENDED:
            with open_file(path) as file:
                file.seek(self._lengths.get(name, 0))
                data = file.read()
            return FileChange(name, data[: data.rfind(b"\n") + 1], is_appended=True)
        if path.stat().st_size <= MAX_INLINE_BYTES:
            return FileChange(name, read_bytes(path))
        return FileChange(name, stored=store_file(self._blobs, path, salt=secrets.token_bytes(16)))

    def _iter_files(self) -> Iterator[tuple[str, Path]]:
        for folder, names, files in os.walk(self._root):
            is_top = Path(folder) == self._root
            names[:] = [n for n in names if not n.startswith(".") and not (is_top and n in OWN)]
            for file in files:
                path = Path(folder) / file
                name = str(path.relative_to(self._root))
                # Names that begin with a dot are unfinished files.
                is_own = file.startswith(".") or name in OWN or fnmatch(name, PUBLISHED)
                is_wanted = name.startswith("checkpoints/") == self._of_checkpoints
                if is_wanted and not is_own and not file.endswith(BEAT):
                    yield name, path

    def _repeat(self, action: Callable[[], None]) -> None:
        while True:
            time.sleep(self._every_s)
            try:
                action()
            except (OSError, SightlineError) as error:  # the next explicit flush raises it
                print(error, file=sys.stderr, flush=True)


def _get_stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:  # it has just been removed
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
