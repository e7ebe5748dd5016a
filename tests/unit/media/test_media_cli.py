from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sightline.cli import media
from sightline.errors import ConfigError, MediaError
from sightline.media import MediaStore

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


def test_put_goes_on_behind_a_refused_file_and_exits_1(
    tmp_path: Path, picture: Picture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.png").write_text("no image")
    picture().save(tmp_path / "yes.png")
    assert call("put", tmp_path / "no.png", tmp_path / "yes.png", "--store", tmp_path / "s") == 1
    printed = capsys.readouterr()
    assert "yes.png" in printed.out
    assert "no.png" in printed.err
    assert "fix:" in printed.err


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


def test_gc_keeps_what_the_run_refers_to(
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


def test_gc_counts_the_run_that_the_store_lies_in_whether_named_or_not(
    run_dir: Path, tmp_path: Path, picture: Picture
) -> None:
    store = MediaStore(run_dir / "media")
    used = put_old(store, picture())
    (run_dir / "traces" / "t").write_text(used)
    (tmp_path / "other" / "traces").mkdir(parents=True)
    assert call("gc", "--store", store.root) == 0
    assert call("gc", "--store", store.root, "--run", tmp_path / "other") == 0
    assert store.has(used)


def test_gc_of_a_shared_store_needs_its_runs(
    store: MediaStore, run_dir: Path, tmp_path: Path, picture: Picture
) -> None:
    digest = put_old(store, picture())
    with pytest.raises(ConfigError, match="which runs use the store"):
        call("gc", "--store", store.root)
    with pytest.raises(MediaError, match="no run directory"):
        call("gc", "--store", store.root, "--run", tmp_path / "wrong")
    with pytest.raises(ConfigError, match="which store is meant"):
        call("gc", "--run", run_dir, run_dir)
    assert store.has(digest)


def test_a_store_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    for action in ("ls", "verify", "gc"):
        with pytest.raises(ConfigError, match="no store at"):
            call(action, "--store", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
