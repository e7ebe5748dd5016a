"""Every kind of store on this machine: a folder, a media service, and an object store (moto's)."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
import uvicorn

from sightline.media import MediaStore, open_store

TOKEN = "a token of the tests"
BUCKET = "images"


class Backing(Protocol):
    """The storage of a store, accessed directly."""

    def names(self) -> list[str]: ...
    def write(self, name: str, data: bytes) -> None: ...
    def clear(self) -> None: ...
    def make_older(self, name: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class FolderBacking:
    root: Path

    def names(self) -> list[str]:
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in paths if path.name != ".lock")

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).write_bytes(data)

    def clear(self) -> None:
        shutil.rmtree(self.root)

    def make_older(self, name: str, seconds: float) -> None:
        before = (self.root / name).stat().st_mtime
        os.utime(self.root / name, (before - seconds, before - seconds))


@dataclass(frozen=True)
class BucketBacking:
    """A bucket of moto, whose server runs in this process and keeps objects in memory."""

    prefix: str

    def _keys(self) -> Any:
        from moto.s3.models import s3_backends

        return s3_backends["123456789012"]["aws"].buckets[BUCKET].keys

    def names(self) -> list[str]:
        keys = [name for name in self._keys() if name.startswith(self.prefix)]
        keys = [name.removeprefix(self.prefix + "/") for name in keys]
        return sorted(name for name in keys if name != ".clock")

    def read(self, name: str) -> bytes:
        return bytes(self._keys()[f"{self.prefix}/{name}"].value)

    def write(self, name: str, data: bytes) -> None:
        self._keys()[f"{self.prefix}/{name}"].value = data

    def clear(self) -> None:
        for name in self.names():
            del self._keys()[f"{self.prefix}/{name}"]

    def make_older(self, name: str, seconds: float) -> None:
        key = self._keys()[f"{self.prefix}/{name}"]
        at = key.last_modified.replace(tzinfo=UTC).timestamp() - seconds
        key.last_modified = datetime.fromtimestamp(at, UTC).replace(tzinfo=None)


@dataclass(frozen=True)
class StoreKind:
    """A store that a test uses."""

    store: MediaStore
    backing: Backing
    folder: Path
    """Options for a cache on another machine."""

    def elsewhere(self, name: str = "elsewhere") -> MediaStore:
        """Return the same store as seen by another machine, with its own cache."""
        return open_store(self.store.root, token=TOKEN, cache_dir=self.folder / name)


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """The address of an ASGI application, in a thread."""
    from sightline.transport.http_server import build_uvicorn_config
    from sightline.transport.listen import bind_socket

    listening = bind_socket("127.0.0.1", 0)
    server = uvicorn.Server(build_uvicorn_config(app))
    thread = threading.Thread(target=server.run, args=[[listening]], daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def folder_kind(folder: Path, **options: Any) -> Iterator[StoreKind]:
    yield StoreKind(MediaStore(folder / "store"), FolderBacking(folder / "store"), folder)


@contextmanager
def http_kind(folder: Path, **options: Any) -> Iterator[StoreKind]:
    from sightline.launch.media_service import build_media_app

    served = MediaStore(folder / "served")
    served.check_writable()
    with serve(build_media_app(served, "127.0.0.1", TOKEN)) as address:
        given = {"token": TOKEN, "cache_dir": folder / "cache", **options}
        yield StoreKind(open_store(address, **given), FolderBacking(folder / "served"), folder)


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of moto's S3 with a bucket, set in the environment as a user would."""
    pytest.importorskip("obstore")
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for each request
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    names |= {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        try:
            yield endpoint
        finally:
            server.stop()


@contextmanager
def s3_kind(folder: Path, **options: Any) -> Iterator[StoreKind]:
    """Needs `s3_server`. The prefix is the test's own."""
    prefix = "/".join(folder.parts[-2:])
    store = open_store(f"s3://{BUCKET}/{prefix}", cache_dir=folder / "cache", **options)
    yield StoreKind(store, BucketBacking(prefix), folder)


KINDS: dict[str, Callable[..., Any]] = {"directory": folder_kind, "http": http_kind, "s3": s3_kind}


def get_endpoint(kind: StoreKind) -> str:
    """Return the address that a proxy forwards to."""
    address = str(kind.store.root)
    return address if urlsplit(address).scheme == "http" else os.environ["AWS_ENDPOINT_URL"]


def behind(kind: StoreKind, proxy: str, patch: pytest.MonkeyPatch, **options: Any) -> MediaStore:
    """Open the same store through `proxy`, with its own cache."""
    address = str(kind.store.root)
    if urlsplit(address).scheme == "http":
        address = proxy
    else:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
    return open_store(address, token=TOKEN, cache_dir=kind.folder / "behind", **options)
