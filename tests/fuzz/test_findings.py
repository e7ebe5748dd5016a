"""Regression tests for the bugs that mutated inputs found."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from sightline.envs.task_files import ParquetRows, open_tasks
from sightline.errors import ConfigError, MediaError, Misaligned
from sightline.view.images_in_use import collect_digests
from sightline.wire.array import Array
from sightline.wire.micro_batch import StepScores, TokenOrigin


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
    left, encoded = (number << 1) ^ (number >> 63), b""
    while left > 127:
        encoded, left = encoded + bytes([left & 127 | 128]), left >> 7
    return encoded + bytes([left])


@pytest.mark.parametrize("num_rows", [-5003, -(2**62), 10**9, 2**62])
def test_parquet_file_with_an_impossible_row_count_is_refused(
    tmp_path: Path, num_rows: int
) -> None:
    """The number is refused before a list is created or gc uses it."""
    path = tmp_path / "samples" / "rows.parquet"
    path.parent.mkdir()
    write_claims(path, 5003)
    assert len(open_tasks(path)) == 5003 and not collect_digests(tmp_path)
    write_claims(path, num_rows)
    with pytest.raises(ConfigError, match=rf"rows\.parquet cannot be read.*{num_rows}"):
        open_tasks(path)
    with pytest.raises(MediaError, match=rf"rows\.parquet cannot be read.*{num_rows}"):
        collect_digests(tmp_path)


def test_saved_table_with_an_impossible_row_count_is_refused(tmp_path: Path) -> None:
    nothing = pyarrow.Array.from_buffers(pyarrow.null(), 2**31 - 1, [None])
    batch = pyarrow.RecordBatch.from_arrays([nothing], ["nothing"])
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    state = {"_data_files": [{"filename": "a.arrow"}], "_fingerprint": "x", "_split": None}
    state |= {"_format_type": None, "_format_columns": None, "_format_kwargs": {}}
    (tmp_path / "state.json").write_text(json.dumps(state | {"_output_all_columns": False}))
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match="declares 2147483647 rows"):
        open_tasks(tmp_path)


@pytest.mark.parametrize("kind", ["compressed", "repeated"])
def test_row_group_larger_than_its_file_is_refused(tmp_path: Path, kind: str) -> None:
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


def test_scores_for_missing_tokens_are_refused() -> None:
    numbers, short = Array.of([0.0] * 10, "float32"), Array.of([0.0] * 9, "float32")
    for start, stop, ratios in ((0, -5, numbers), (5, 3, numbers), (0, 11, numbers), (0, 9, short)):
        origin = TokenOrigin(start=start, stop=stop, node=0, trace_id="t")
        with pytest.raises(Misaligned, match="do not line up"):
            StepScores(1, [origin], numbers, ratios, numbers)
