from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from store_kinds import KINDS, TOKEN

from sightline.cli import media
from sightline.errors import ConfigError, MediaError
from sightline.media import MediaStore, open_store
from sightline.media.stored_file import open_blobs
from sightline.wire.weights import MANIFEST, Manifest, WeightFile

Picture = Callable[..., Image.Image]


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    media.add_arguments(parser)
    return media.run(parser.parse_args([*map(str, words)]))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "traces").mkdir(parents=True)
    return tmp_path / "run"


def put_old(store: MediaStore, image: Image.Image) -> str:
    digest = store.put(image).digest
    os.utime(store.path(digest), (time.time() - 10_000,) * 2)
    return digest


def test_put_prints_a_ref_for_each_file_and_ls_lists_it(
    run_dir: Path, tmp_path: Path, picture: Picture, capsys: pytest.CaptureFixture[str]
) -> None:
    picture().save(tmp_path / "a.png")
    assert call("put", tmp_path / "a.png", "--run", run_dir) == 0
    printed = capsys.readouterr().out
    (digest,) = MediaStore(run_dir / "media").digests()
    assert f"media:sha256:{digest}  image/png  9x5" in printed
    assert call("ls", "--store", run_dir / "media") == 0
    assert digest in capsys.readouterr().out


def test_verify_exits_1_and_names_the_damaged_file(
    store: MediaStore, picture: Picture, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = store.put(picture()).digest
    assert call("verify", "--store", store.root) == 0
    store.path(digest).write_bytes(b"damage")
    capsys.readouterr()
    assert call("verify", "--store", store.root) == 1
    assert f"damaged: {store.path(digest)}" in capsys.readouterr().out
    assert call("ls", "--store", store.root) == 1
    assert f"{digest}  damaged" in capsys.readouterr().out


def test_gc_keeps_images_of_the_run(
    run_dir: Path, picture: Picture, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MediaStore(run_dir / "media")
    used, unused = put_old(store, picture(seed=1)), put_old(store, picture(seed=2))
    young = store.put(picture(seed=3)).digest
    (run_dir / "traces" / "t").write_text(used)
    assert call("gc", "--run", run_dir, "--dry-run") == 0
    assert unused in capsys.readouterr().out
    assert set(store.digests()) == {used, unused, young}
    assert call("gc", "--run", run_dir) == 0
    assert "removed 1 images" in capsys.readouterr().out
    assert set(store.digests()) == {used, young}
    assert call("gc", "--run", run_dir, "--min-age-s", 0) == 0
    assert set(store.digests()) == {used}


def test_gc_keeps_the_parts_of_published_weights_and_removes_others(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = open_blobs(run_dir / "media")
    used, unused = (blobs.put_bytes(data) for data in (b"used", b"unused"))
    for digest in (used, unused):
        os.utime(blobs.path(digest), (time.time() - 10_000,) * 2)
    version = run_dir / "weights" / "v000001"
    version.mkdir(parents=True)
    file = WeightFile("model.safetensors", 4, "0" * 64, (used,))
    (version / MANIFEST).write_bytes(msgspec.json.encode(Manifest(1, 1, [file])))
    assert call("gc", "--store", blobs.root, "--dry-run") == 0
    assert call("gc", "--run", run_dir) == 0
    assert "removed 1 parts of files" in capsys.readouterr().out
    assert list(blobs.digests()) == [used]


def test_gc_always_includes_the_run_containing_the_store(
    run_dir: Path, tmp_path: Path, picture: Picture
) -> None:
    store = MediaStore(run_dir / "media")
    used = put_old(store, picture())
    (run_dir / "traces" / "t").write_text(used)
    (tmp_path / "other" / "traces").mkdir(parents=True)
    assert call("gc", "--store", store.root) == 0
    assert call("gc", "--store", store.root, "--run", tmp_path / "other") == 0
    assert store.has(used)


def test_remote_store_is_maintained_by_its_address(
    run_dir: Path,
    tmp_path: Path,
    picture: Picture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEDIA_TOKEN", TOKEN)
    picture().save(tmp_path / "a.png")
    with KINDS["http"](tmp_path) as kind:
        there = ["--store", kind.store.root, "--token", "env:MEDIA_TOKEN"]
        assert call("put", tmp_path / "a.png", *there) == 0
        (name,) = kind.backing.names()
        assert call("ls", *there) == 0
        assert f"media:sha256:{Path(name).name}" in capsys.readouterr().out
        text = f'[media]\nroot = "{kind.store.root}"\ntoken = "env:MEDIA_TOKEN"\n'
        (run_dir / "config.toml").write_text(text)
        assert call("ls", "--run", run_dir) == 0
        assert Path(name).name in capsys.readouterr().out
        kind.backing.make_older(name, 4000)
        with pytest.raises(ConfigError, match="no run given that uses the store http"):
            call("gc", *there)
        assert call("gc", "--run", run_dir, *there) == 0
        assert "removed 1 images" in capsys.readouterr().out
        put_again = kind.store.put(picture(seed=1))
        kind.backing.write(
            f"{put_again.digest[:2]}/{put_again.digest[2:4]}/{put_again.digest}", b"x"
        )
        assert call("verify", *there) == 1
        assert f"damaged: {put_again.digest}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a secret on the command line"):
        call("ls", "--store", "http://127.0.0.1:1", "--token", "the token itself")


def test_serve_prints_its_address_and_requires_a_token_off_loopback(
    tmp_path: Path, picture: Picture, python: Callable[..., subprocess.Popen[str]]
) -> None:
    token = tmp_path / "token"
    token.write_text("a token in a file\n")
    words = ["media", "serve", tmp_path / "served", "--port", "0", "--token", f"file:{token}"]
    process = python("import sys; from sightline.cli.main import main; sys.exit(main())", *words)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        store = open_store(address, token="a token in a file", cache_dir=tmp_path / "cache")
        ref = store.put(picture())
        assert MediaStore(tmp_path / "served").has(ref)
    finally:
        process.terminate()
        process.communicate()
    with pytest.raises(ConfigError, match="the server has no token"):
        call("serve", tmp_path / "served", "--host", "0.0.0.0", "--port", "0")


def test_gc_of_a_shared_store_requires_its_runs(
    store: MediaStore, run_dir: Path, tmp_path: Path, picture: Picture
) -> None:
    digest = put_old(store, picture())
    with pytest.raises(ConfigError, match="no run given that uses the store"):
        call("gc", "--store", store.root)
    with pytest.raises(MediaError, match="not a run directory"):
        call("gc", "--store", store.root, "--run", tmp_path / "wrong")
    with pytest.raises(ConfigError, match="no store given"):
        call("gc", "--run", run_dir, run_dir)
    assert store.has(digest)


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_that_does_not_exist_is_refused(port: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no port {port}"):
        call("serve", tmp_path, f"--port={port}")


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_size_limit_that_is_no_size_is_refused(size: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_gb"):
        call("serve", tmp_path, f"--max-gb={size}", "--port=-1")


def test_put_creates_no_run(tmp_path: Path, picture: Picture) -> None:
    picture().save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="no run at"):
        call("put", tmp_path / "a.png", "--run", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_an_empty_store_is_not_the_current_folder(tmp_path: Path, picture: Picture) -> None:
    """As in `--store "$STORE"` with an unset variable."""
    picture().save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="no store given"):
        call("put", tmp_path / "a.png", "--store", "")
