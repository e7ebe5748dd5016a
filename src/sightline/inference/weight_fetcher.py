"""Weights that are in the store, brought to this machine's disk for an engine that reads files.

    CACHE_DIR/weights-HOST-PID_.../DIGEST/    a version; the newest, and the next while it comes

Who makes such a folder removes those of processes of its machine that are gone.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import weakref
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import msgspec

from sightline.errors import WeightsError
from sightline.media import MediaStore
from sightline.media.files import remove_of_dead
from sightline.media.remote import DEFAULT_CACHE_DIR
from sightline.media.stored_file import list_parts
from sightline.wire.weights import MANIFEST, Manifest, fetch_files


class WeightFetcher:
    """Keeps the files of the newest version: the next one takes from them what did not change."""

    def __init__(self, blobs: MediaStore, cache_dir: str = "") -> None:
        self.blobs = blobs
        self._parent = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
        self._here: dict[str, tuple[Path, int]] = {}

    @cached_property
    def root(self) -> Path:
        """The folder of this process, made when it is first needed."""
        prefix = f"weights-{socket.gethostname()}-"  # homes may be shared by machines
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            remove_of_dead(self._parent, prefix)
            root = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}_", dir=self._parent))
        except OSError as error:
            raise WeightsError(
                f"no folder for weights can be made in {self._parent}: {error.strerror}",
                "set [media] cache_dir, or --media-cache-dir of a server, to a folder of this "
                "machine that this user can write to",
            ) from error
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        return root

    def fetch(self, manifest: Manifest) -> Path:
        """The path of the manifest on this disk, with its files beside it."""
        data = msgspec.json.encode(manifest)
        folder = self.root / sha256(data).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        fetch_files(manifest, self.blobs, folder, self._here)
        (folder / MANIFEST).write_bytes(data)
        return folder / MANIFEST

    def keep_only(self, manifest_path: Path, manifest: Manifest) -> None:
        """Called when the engine has taken the version: the files of others go."""
        folder = manifest_path.parent
        self._here = {}
        for file in manifest.files:
            self._here |= list_parts(folder / file.name, file.parts)
        for other in self.root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
