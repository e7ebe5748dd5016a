"""Regression tests for the bugs that mutated inputs found."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from sightline.envs.task_files import ParquetRows, open_tasks
from sightline.errors import (
    ConfigError,
    MediaError,
    MediaRefused,
    MessageError,
    Misaligned,
    WireError,
)
from sightline.media import ImageIngestor, MediaStore
from sightline.run.run_dir import RunDir
from sightline.view.images_in_use import collect_digests
from sightline.view.run_files import RunFiles
from sightline.wire import control
from sightline.wire.array import Array
from sightline.wire.micro_batch import StepScores, TokenOrigin


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


def write_claims(path: Path, num_rows: int) -> None:
    """A parquet file of 5,003 rows whose footer says `num_rows`, in all of its places."""
    parquet.write_table(pyarrow.table({"number": range(5003)}), path, compression="zstd")
    data = path.read_bytes()
    num_bytes = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - num_bytes : -8]
    true, claimed = (b"\x16" + encode_varint(number) for number in (5003, num_rows))
    assert footer.count(true) == 3, "of the file, of the group and of its column"
    footer = footer.replace(true, claimed)
    end = footer + len(footer).to_bytes(4, "little") + data[-4:]
    path.write_bytes(data[: -8 - num_bytes] + end)


def encode_varint(number: int) -> bytes:
    """An i64 of Thrift's compact protocol."""
    left, made = (number << 1) ^ (number >> 63), b""
    while left > 127:
        made, left = made + bytes([left & 127 | 128]), left >> 7
    return made + bytes([left])


@pytest.mark.parametrize("num_rows", [-5003, -(2**62), 10**9, 2**62])
def test_a_parquet_file_of_impossibly_many_rows_is_refused(tmp_path: Path, num_rows: int) -> None:
    """Before a list of them is made, or gc walks through them."""
    path = tmp_path / "samples" / "rows.parquet"
    path.parent.mkdir()
    write_claims(path, 5003)
    assert len(open_tasks(path)) == 5003 and not collect_digests(tmp_path)
    write_claims(path, num_rows)
    with pytest.raises(ConfigError, match=rf"rows\.parquet cannot be read.*{num_rows}"):
        open_tasks(path)
    with pytest.raises(MediaError, match=rf"rows\.parquet cannot be read.*{num_rows}"):
        collect_digests(tmp_path)


def test_a_saved_table_of_impossibly_many_rows_is_refused(tmp_path: Path) -> None:
    nothing = pyarrow.Array.from_buffers(pyarrow.null(), 2**31 - 1, [None])
    batch = pyarrow.RecordBatch.from_arrays([nothing], ["nothing"])
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    with pytest.raises(ConfigError, match="declares 2147483647 rows"):
        open_tasks(tmp_path)


@pytest.mark.parametrize("kind", ["compressed", "repeated"])
def test_a_row_group_that_grows_out_of_its_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.parquet"
    long = "x" * 10_000
    if kind == "compressed":
        column = pyarrow.array([f"{number}{long}" for number in range(400)])
    else:
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 400), [long])
    table = pyarrow.table({"text": column, "number": range(400)})
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read: ValueError: a row group"):
        ParquetRows(path, max_group_bytes=1 << 20).row(0)
    assert ParquetRows(path).row(399)["number"] == 399


def test_a_line_of_tasks_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000 + "\n" + json.dumps({"image": "a\0b"}) + "\n")
    store = MediaStore(tmp_path / "media")
    with pytest.raises(ConfigError, match="row 0"):
        open_tasks(path).read(0, store.put)
    with pytest.raises(MediaRefused, match="invalid path"):
        open_tasks(path, images=["image"]).read(1, store.put)


@pytest.mark.parametrize("data", [b'{"outcome": "\xff"}', b"[" * 100_000, b"[]"])
def test_a_damaged_summary_is_left_out(tmp_path: Path, data: bytes) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_bytes(b"")
    run_dir.summary.write_bytes(data)
    assert RunFiles(run_dir).find_summary() is None


@pytest.mark.parametrize(
    ("node", "start", "stop"), [(0, 0, -5), (0, 5, 3), (0, 0, 11), (0, -4, 0), (-1, 0, 4)]
)
def test_scores_of_tokens_that_are_not_there_are_refused(node: int, start: int, stop: int) -> None:
    """The page of a rollout ended with an error of numpy."""
    numbers = Array.of([0.0] * 10, "float32")
    made = StepScores(
        1, [TokenOrigin(start=0, stop=10, node=0, trace_id="t")], numbers, numbers, numbers
    )
    values = msgspec.msgpack.decode(made.to_bytes())
    values["origins"][0] |= {"node": node, "start": start, "stop": stop}
    with pytest.raises(WireError, match="do not line up"):
        StepScores.from_bytes(msgspec.msgpack.encode(values))
    short = Array.of([0.0] * 9, "float32")
    with pytest.raises(Misaligned):
        StepScores(1, [], numbers, short, numbers)
