"""What mutated inputs have found, each as it was mended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sightline.envs.task_files import open_tasks
from sightline.errors import ConfigError, MediaRefused, MessageError, WireError
from sightline.media import ImageIngestor, MediaStore
from sightline.run.run_dir import RunDir
from sightline.view.run_files import RunFiles
from sightline.wire import control


@pytest.mark.parametrize("scheme", ["http", "https", "HTTPS"])
def test_a_scheme_without_a_colon_is_no_url(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(MediaRefused, match="not a url"):
        ImageIngestor(MediaStore(tmp_path)).resolve(scheme, "url")


def test_a_file_url_with_half_an_address_is_no_url(tmp_path: Path) -> None:
    with pytest.raises(MessageError, match="not a url"):
        ImageIngestor(MediaStore(tmp_path)).resolve("file://[q/tmp/z.png", "url")


@pytest.mark.parametrize("data", [b"\x82\xa4type\xa6di\xe7est\xa1d", b"\x91" * 100_000])
def test_a_control_message_that_is_no_text_or_too_deep_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="are not a message"):
        control.decode(data)


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = (Path(__file__).parent / "corpus" / "parquet" / "features").read_bytes()
    path = tmp_path / "rows.parquet"
    for data in (b"", whole[:100], whole[:4] + bytes(200) + whole[204:], whole[:-30] + whole[-8:]):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read"):
            open_tasks(path).read(0, MediaStore(tmp_path / "media").put)


def test_a_line_of_tasks_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000 + "\n" + json.dumps({"image": "a\0b"}) + "\n")
    store = MediaStore(tmp_path / "media")
    with pytest.raises(ConfigError, match="row 0"):
        open_tasks(path).read(0, store.put)
    with pytest.raises(MediaRefused, match="is no path"):
        open_tasks(path, images=["image"]).read(1, store.put)


@pytest.mark.parametrize("data", [b'{"outcome": "\xff"}', b"[" * 100_000, b"[]"])
def test_a_damaged_summary_is_left_out(tmp_path: Path, data: bytes) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_bytes(b"")
    run_dir.summary.write_bytes(data)
    assert RunFiles(run_dir).find_summary() is None
