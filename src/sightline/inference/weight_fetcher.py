"""Download of published weights to the local disk, for engines that read files.

    CACHE_DIR/weights-HOST-PID_.../DIGEST/    one version: the newest, and the next while it loads

Creating a folder removes the folders of dead processes on this machine.
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
    """Downloads weight versions, and copies unchanged parts from the newest version on disk."""

    def __init__(self, blobs: MediaStore, cache_dir: str = "") -> None:
        self.blobs = blobs
        self._parent = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
        self._here: dict[str, tuple[Path, int]] = {}

    @cached_property
    def root(self) -> Path:
        """This process's folder, created on first use."""
        prefix = f"weights-{socket.gethostname()}-"  # machines may share a home folder
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            remove_of_dead(self._parent, prefix)
            root = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}_", dir=self._parent))
        except OSError as error:
            problem = f"cannot create a folder for weights in {self._parent}: {error.strerror}"
            setting = "[media] cache_dir, or the server's --media-cache-dir,"
            fix = f"set {setting} to a writable folder of this machine"
            raise WeightsError(problem, fix) from error
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        return root

    def fetch(self, manifest: Manifest) -> Path:
        """Download a version and return the path of its local manifest."""
        data = msgspec.json.encode(manifest)
        folder = self.root / sha256(data).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        fetch_files(manifest, self.blobs, folder, self._here)
        (folder / MANIFEST).write_bytes(data)
        return folder / MANIFEST

    def keep_only(self, manifest_path: Path, manifest: Manifest) -> None:
        """Remove all other versions. Call this once the engine has adopted the version."""
        folder = manifest_path.parent
        self._here = {}
        for file in manifest.files:
            self._here |= list_parts(folder / file.name, file.parts)
        for other in self.root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
