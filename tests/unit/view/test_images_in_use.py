from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from sightline.errors import MediaError
from sightline.media import MediaRef
from sightline.view import images_in_use
from sightline.view.images_in_use import collect_digests


def digest(seed: int) -> str:
    return sha256(str(seed).encode()).hexdigest()


def ref(seed: int) -> MediaRef:
    return MediaRef(digest(seed), "image/png", 4, 3, 5)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for folder in images_in_use.RUN_FOLDERS:
        (tmp_path / "run" / folder).mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.parametrize("folder", images_in_use.RUN_FOLDERS)
def test_digests_are_found_in_every_referring_folder(run_dir: Path, folder: str) -> None:
    deep = run_dir / folder / "step_3" / "rank_0"
    deep.mkdir(parents=True)
    (deep / "data.msgpack").write_bytes(msgspec.msgpack.encode([ref(1), ref(2)]))
    (run_dir / folder / "data.json").write_text(json.dumps({"url": ref(3).url}))
    assert collect_digests(run_dir) == {digest(1), digest(2), digest(3)}


@pytest.mark.parametrize("offset", [0, 1, 30, 63, 64, 65])
def test_digest_across_a_chunk_boundary_is_found(
    run_dir: Path, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_in_use, "_CHUNK_BYTES", 64)
    (run_dir / "traces" / "t").write_bytes(b"-" * offset + digest(1).encode() + b"-" * 100)
    assert collect_digests(run_dir) == {digest(1)}


def test_compressed_parquet_samples_are_read(run_dir: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"text": "no image", "media": [{"digest": digest(i)}], "url": ref(100 + i).url}
        for i in range(200)
    ]
    path = run_dir / "samples" / "step_1.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
    expected = {digest(i) for i in range(200)} | {digest(100 + i) for i in range(200)}
    assert collect_digests(run_dir) == expected


def test_damaged_parquet_file_is_an_error(run_dir: Path) -> None:
    pytest.importorskip("pyarrow")
    (run_dir / "samples" / "s.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(MediaError, match=r"s\.parquet"):
        collect_digests(run_dir)


def test_non_run_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MediaError, match="not a run directory"):
            collect_digests(path)


def test_links_are_followed_once(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "t").write_text(digest(1))
    (run_dir / "traces" / "link").symlink_to(tmp_path / "elsewhere")
    (run_dir / "traces" / "up").symlink_to(run_dir / "traces")
    assert collect_digests(run_dir) == {digest(1)}


def test_a_file_renamed_into_place_during_the_search_is_found(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = run_dir / "batches" / "a.tmp"
    half.write_text("half")
    (run_dir / "batches" / "b").write_text("x")
    search = images_in_use._digests_in_file

    def search_while_the_writer_finishes(path: Path) -> object:
        if half.exists() and path.name == "b":
            half.write_text("half and " + digest(1))
            half.rename(run_dir / "batches" / "a")
        return search(path)

    monkeypatch.setattr(images_in_use, "_digests_in_file", search_while_the_writer_finishes)
    assert collect_digests(run_dir) == {digest(1)}


@pytest.mark.parametrize("name", ["t.zst", "t.msgpack.gz", "t.npz"])
def test_compressed_file_is_an_error(run_dir: Path, name: str) -> None:
    (run_dir / "traces" / name).write_bytes(b"anything")
    with pytest.raises(MediaError, match=name):
        collect_digests(run_dir)


def test_dangling_link_is_an_error(run_dir: Path) -> None:
    (run_dir / "traces" / "link").symlink_to(run_dir / "nowhere")
    with pytest.raises(MediaError, match="keep changing"):
        collect_digests(run_dir)


def test_a_pipe_in_a_run_directory_does_not_stop_the_search(run_dir: Path) -> None:
    os.mkfifo(run_dir / "traces" / "pipe")
    (run_dir / "traces" / "t").write_text(digest(1))
    assert collect_digests(run_dir) == {digest(1)}
