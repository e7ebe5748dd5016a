"""A model is a folder or an id of the hub, from the local cache first."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from sightline import FamilyError, MediaStore, load_family, load_renderer
from sightline.families.checkpoint_files import CONFIG_FILES, resolve_checkpoint
from sightline.launch.checks.model import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(cache: Path, model: Path, names: list[str]) -> Path:
    repo = cache / "models--lab--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in names:
        shutil.copy(model / name, snapshot / name)
    return snapshot


def test_local_folder_resolves_to_itself(tiny_model: Path) -> None:
    assert resolve_checkpoint(tiny_model) == tiny_model
    assert resolve_checkpoint("no/such/folder/at/all") == Path("no/such/folder/at/all")


def test_hub_id_is_resolved_from_the_cache_with_its_commit(cache: Path, tiny_model: Path) -> None:
    names = [name for name in CONFIG_FILES if (tiny_model / name).is_file()]
    snapshot = keep(cache, tiny_model, names)
    assert resolve_checkpoint("lab/tiny") == snapshot
    assert resolve_checkpoint(f"lab/tiny@{COMMIT}") == snapshot
    assert load_family("lab/tiny").fingerprint == load_family(tiny_model).fingerprint
    assert load_renderer("lab/tiny", MediaStore(cache.parent / "media")).vocab_size
    with pytest.raises(FamilyError, match=r"lacks \*\.safetensors"):
        resolve_checkpoint("lab/tiny", with_weights=True)


def test_offline_error_names_the_uncached_files(cache: Path) -> None:
    with pytest.raises(FamilyError, match="is not a folder") as caught:
        resolve_checkpoint("lab/tiny")
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        assert name in caught.value.fix
    assert "`sightline sft FILE`" in caught.value.fix


def test_the_resolved_run_file_names_the_commit(cache: Path, tiny_model: Path) -> None:
    from sightline.config import SftFile

    snapshot = keep(cache, tiny_model, [file.name for file in tiny_model.iterdir()])
    config = SftFile.model_validate(
        {
            "model": {"path": "lab/tiny"},
            "env": {"name": "color_codeword"},
            "sft": {"output_dir": "x"},
        }
    )
    assert resolve_model(config).model.path == str(snapshot)


class Hub(BaseHTTPRequestHandler):
    """Speaks as much of the hub's protocol as its client asks for, from a folder."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/lab/tiny/resolve/"):
            body = (self.folder / Path(path).name).read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            if self.command == "GET":
                self.asked.append(Path(path).name)
        elif path.startswith("/api/models/lab/tiny/tree/"):
            files = [(file.name, file.stat().st_size) for file in self.folder.iterdir()]
            tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in files]
            body = json.dumps(tree).encode()
        elif path.startswith("/api/models/lab/tiny"):
            names = [{"rfilename": file.name} for file in self.folder.iterdir()]
            body = json.dumps({"id": "lab/tiny", "sha": COMMIT, "siblings": names}).encode()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that holds lab/tiny, and the files that were fetched from it."""
    requests: list[str] = []
    handler = type("TinyHub", (Hub,), {"folder": tiny_model, "asked": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()
    thread.join()


FIND = """
import sys
from sightline.families.checkpoint_files import resolve_checkpoint
print(resolve_checkpoint(sys.argv[1], with_weights=sys.argv[2] == "weights"))
"""


@pytest.mark.thorough
def test_uncached_files_are_fetched_small_ones_first(
    hub: tuple[str, list[str]], tiny_model: Path, tmp_path: Path
) -> None:
    address, requests = hub
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}

    def find(model: str, what: str = "files", **more: str) -> Path:
        words = [sys.executable, "-c", FIND, model, what]
        done = subprocess.run(words, env={**env, **more}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip().splitlines()[-1])

    small = {name for name in CONFIG_FILES if (tiny_model / name).is_file()}
    folder = find("lab/tiny")
    assert folder.name == COMMIT
    assert set(requests) == small == {file.name for file in folder.iterdir()}
    requests.clear()
    assert find("lab/tiny", HF_HUB_OFFLINE="1") == folder and not requests
    assert find(f"lab/tiny@{COMMIT}", "weights") == folder
    assert requests == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == (
        tiny_model / "model.safetensors"
    ).read_bytes()
