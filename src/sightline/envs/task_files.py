"""Tasks from files: JSONL, parquet, or datasets of the `datasets` library.

Rows are read on demand, and no file is loaded completely. `read` puts a row's images into the store
and replaces them by refs. Image columns are those that the `datasets` library declared in the file,
and those named in `images`.
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from sightline.envs.protocol import import_extra
from sightline.errors import ConfigError, MediaError, MediaRefused
from sightline.media import MediaRef, read_data_url
from sightline.regular_file import check_file, open_file

Put = Callable[[Any], MediaRef]
FEATURES_KEY = b"huggingface"
"""Schema key under which the `datasets` library declares column types."""
_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
MAX_GROUP_BYTES = 1 << 30
"""Memory limit for a row group, in addition to 16 times the size of its file."""
_BATCH_ROWS = 1024
_SCAN_ROWS = 64
"""Rows that a scan holds in memory, with their images."""
RECENT_ROWS = 32
"""Rows that are kept for the other rollouts of their group."""


@dataclass(eq=False, repr=False)
class TaskFile:
    """Rows of a file as tasks. No row is in two splits.

    Training uses each row once per epoch, in an order that the epoch and `seed` determine. Without
    a seed, it is the file's order.
    """

    rows: TaskRows
    folder: Path
    """The folder of the images that rows name."""
    images: Sequence[str]
    numbers: Mapping[str, Sequence[int]]
    """Row numbers by split."""
    seed: int | None

    def __post_init__(self) -> None:
        self._order: tuple[int, list[int]] = (-1, [])
        """An epoch and its order."""
        self._recent: LRUCache[int, dict[str, Any]] = LRUCache(RECENT_ROWS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, split: str) -> int:
        return len(self.numbers.get(split, ()))

    def get_row_number(self, index: int, split: str) -> int:
        """Return the row number of task `index` in a split. Indices wrap around."""
        numbers = self.numbers.get(split)
        if not numbers:
            raise ConfigError(
                f"the split {split!r} has no rows, out of {len(self.rows)}",
                f"give it some, for example with {split}_fraction = 0.1",
            )
        epoch, at = divmod(index, len(numbers))
        if split != "train" or self.seed is None:
            return numbers[at]
        current, order = self._order
        if current != epoch:
            order = list(range(len(numbers)))
            random.Random(f"{self.seed}:epoch:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return numbers[order[at]]

    def read(self, number: int, put: Put) -> dict[str, Any]:
        """Return a row, with its images replaced by refs."""
        row = self.read_raw(number)
        for column in (self.rows.image_columns | {*self.images}) & row.keys():
            name = f"column {column!r}"
            try:
                row[column] = put_cell_images(row[column], put, self.folder, name)
            except MediaError as error:
                problem = f"{name}: {error.problem.removeprefix(f'{name}: ')}"
                raise type(error)(f"{self.where(number)}, {problem}", error.fix) from error
        return row

    def read_raw(self, number: int) -> dict[str, Any]:
        """Return a row as it is in the file."""
        with self._lock:
            row = self._recent.get(number)
            if row is None:
                row = self._recent[number] = self.rows.row(number)
        return dict(row)

    def where(self, number: int) -> str:
        """Return the file and line, or the dataset and row."""
        return self.rows.where(number)


def open_tasks(
    path: str | Path,
    dataset_split: str = "",
    images: Sequence[str] = (),
    eval_fraction: float = 0.1,
    sft_fraction: float = 0.0,
    seed: int = 0,
) -> TaskFile:
    """Open the tasks of a file, a folder, or a dataset on the Hub (`owner/name`).

    `dataset_split` names one of several splits. The `datasets` library loads folders and
    datasets on the Hub. `eval_fraction` and `sft_fraction` are the fractions of the rows for those
    splits. The rest is for training.
    """
    check_fractions(path, eval_fraction, sft_fraction)
    rows, folder = open_rows(path, dataset_split)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    numbers: dict[str, list[int]] = {}
    for split, share in (("eval", eval_fraction), ("sft", sft_fraction)):
        size = round(share * len(rows))
        numbers[split], order = order[:size], order[size:]
    return TaskFile(rows, folder, images, {**numbers, "train": order}, seed)


def check_fractions(path: str | Path, eval_fraction: float, sft_fraction: float) -> None:
    if not (eval_fraction >= 0 and sft_fraction >= 0 and eval_fraction + sft_fraction <= 1):
        raise ConfigError(
            f"{path}: {eval_fraction=} and {sft_fraction=} are not fractions of the rows",
            "choose fractions from 0 to 1 whose sum is at most 1",
        )


def open_rows(path: str | Path, dataset_split: str = "") -> tuple[TaskRows, Path]:
    """Open the rows of a file, a folder or a dataset. Return them with the images' folder."""
    source = Path(path)
    rows: TaskRows
    is_dataset_id = str(path).count("/") == 1 and source.suffix not in _SUFFIXES
    if source.is_dir() and not dataset_split:
        tables = sorted(file for file in source.iterdir() if file.suffix in _SUFFIXES)
        if len(tables) == 1:
            source = tables[0]
        elif any(file.suffix in _SUFFIXES[:2] for file in tables):
            raise ConfigError(
                f"{source} has several files of rows: {', '.join(file.name for file in tables)}",
                f"set the path to one of them, such as {str(tables[0])!r}",
            )
    if source.is_file() and dataset_split:
        raise ConfigError(
            f"{source} is a file, so it has no split {dataset_split!r}",
            "leave the name of the split empty. It is for datasets, whose splits have names",
        )
    if source.is_dir() or (is_dataset_id and not source.exists()):
        rows, folder = _load_with_datasets(str(path), dataset_split), source
    elif not source.exists():
        raise ConfigError(
            f"there is no file or folder {str(path)!r}",
            "check the path. It may be a .jsonl or .parquet file, a folder with one such file, a "
            "folder that the datasets library saved, a folder of parquet shards, or a dataset on "
            "the Hub, owner/name",
        )
    elif source.suffix in _SUFFIXES[:2]:
        rows, folder = JsonlRows(source), source.parent
    elif source.suffix == ".parquet":
        rows, folder = ParquetRows(source), source.parent
    else:
        raise ConfigError(
            f"{source}: unsupported file type {source.suffix!r}",
            "use a .jsonl or .parquet file, a folder of shards, or the id of a dataset",
        )
    if not len(rows):
        raise ConfigError(f"{source} has no rows", "use a file with at least one row")
    return rows, folder


def _load_with_datasets(name: str, dataset_split: str) -> ArrowRows:
    """Load a dataset from the Hub, a folder saved by the library, or a folder of shards."""
    library = import_extra("datasets", "datasets")
    saved = (Path(name) / file for file in ("state.json", "dataset_dict.json"))
    try:
        if any(file.is_file() for file in saved):
            loaded = library.load_from_disk(name)
        else:
            loaded = library.load_dataset(name, split=dataset_split or "train")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"the datasets library cannot load {name}, split {dataset_split or 'train'!r}: "
            f"{type(error).__name__}: {error}",
            "check the path or name, the split and the network, or pass a folder",
        ) from error
    if isinstance(loaded, dict):
        if dataset_split not in loaded:
            raise ConfigError(
                f"{name} has no split {dataset_split!r}. It has {', '.join(loaded)}",
                "choose one of them: open_tasks(path, dataset_split=...)",
            )
        loaded = loaded[dataset_split]
    table = loaded.data.table
    with _name_damage(Path(name)):
        _check_num_rows(table.num_rows, table.nbytes)
    files = [Path(file["filename"]) for file in loaded.cache_files]
    return ArrowRows(name, table, loaded.features.arrow_schema, files)


class JsonlRows:
    """Rows of a JSONL file. Only line offsets are kept in memory."""

    image_columns: frozenset[str] = frozenset()

    def __init__(self, path: Path) -> None:
        self._path, self.files = path, [path]
        self._starts: list[int] = []
        at = 0
        with open_file(path) as file:
            for line in file:
                if line.strip():
                    self._starts.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> dict[str, Any]:
        with open_file(self._path) as file:
            file.seek(self._starts[number])
            return self._parse(number, file.readline())

    def scan(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every row, with those of the columns that it has."""
        with open_file(self._path) as file:
            for number, line in enumerate(filter(bytes.strip, file)):
                row = self._parse(number, line)
                yield {column: row[column] for column in columns if column in row}

    def where(self, number: int) -> str:
        at = 0
        with open_file(self._path) as file:
            for line, text in enumerate(file, 1):
                if at == self._starts[number]:
                    return f"{self._path}, line {line}"
                at += len(text)
        return str(self._path)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.where(number)}: {error}", "fix this line") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{self.where(number)} is a {type(row).__name__}", "write one JSON object per line"
            )
        return row


class ParquetRows:
    """Rows of a parquet file, read by row group. The last group is cached."""

    def __init__(self, path: Path, max_group_bytes: int = MAX_GROUP_BYTES) -> None:
        self._path, self.files = path, [path]
        self._max_group_bytes = max_group_bytes + 16 * path.stat().st_size
        self._file, sizes = open_parquet(path, max_group_bytes, memory_map=True)
        self._stops = list(itertools.accumulate(sizes))
        self._cached: tuple[int, Any] = (-1, None)
        with _name_damage(path):
            self.image_columns = image_columns(self._file.schema_arrow)

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def row(self, number: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._stops, number)
        cached, table = self._cached
        with _name_damage(self._path):
            if cached != group:
                table = self._read_group(group)
                self._cached = (group, table)
            first = self._stops[group - 1] if group else 0
            return _read_row(table, number - first)

    def scan(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every row, with those of the columns that the file has."""
        names = [column for column in columns if column in self._file.schema_arrow.names]
        with _name_damage(self._path):
            for batch in self._file.iter_batches(_SCAN_ROWS, columns=names):
                yield from batch.to_pylist()

    def where(self, number: int) -> str:
        return f"{self._path}, row {number}"

    def _read_group(self, group: int) -> Any:
        """Read a row group in batches. A value that is stored once may expand to every row."""
        most, num_bytes, batches = self._max_group_bytes, 0, []
        for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=[group]):
            num_bytes += batch.nbytes
            if num_bytes > most:
                raise ValueError(f"a row group takes more than {most} bytes of memory")
            batches.append(batch)
        return import_extra("pyarrow", "data").Table.from_batches(batches)


def open_parquet(
    path: Path, max_group_bytes: int = MAX_GROUP_BYTES, memory_map: bool = False
) -> tuple[Any, list[int]]:
    """Open and check a parquet file. Return it with the sizes of its row groups."""
    parquet = import_extra("pyarrow.parquet", "data")
    with _name_damage(path):
        file = parquet.ParquetFile(check_file(path), memory_map=memory_map)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        sizes = [group.num_rows for group in groups]
        if min(sizes, default=0) < 0 or sum(sizes) != file.metadata.num_rows:
            raise ValueError(f"row groups of {sizes} rows, {file.metadata.num_rows} in all")
        num_bytes = path.stat().st_size
        _check_num_rows(sum(sizes), num_bytes)
        most = max_group_bytes + 16 * num_bytes
        largest = max((group.total_byte_size for group in groups), default=0)
        if largest > most:
            raise ValueError(f"a row group has {largest} bytes, more than {most}")
    return file, sizes


def _check_num_rows(num_rows: int, num_bytes: int) -> None:
    """Raise if a file declares more rows than it has bits, because all rows are listed."""
    if num_rows > 8 * num_bytes:
        raise ValueError(f"it declares {num_rows} rows in {num_bytes} bytes")


@contextmanager
def _name_damage(path: Path) -> Iterator[None]:
    """Convert pyarrow's errors about damaged files into one that names the file."""
    try:
        yield
    except (
        OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError,
        NotImplementedError, RecursionError,
    ) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} cannot be read: {reason}", "write the file again") from error


class ArrowRows:
    """Rows of an Arrow table. `schema` declares the image columns."""

    def __init__(self, name: str, table: Any, schema: Any, files: Sequence[Path] = ()) -> None:
        self._name, self._table, self.files = name, table, files
        self.image_columns = image_columns(schema)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> dict[str, Any]:
        return _read_row(self._table, number)

    def scan(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield every row, with those of the columns that the table has."""
        names = [column for column in columns if column in self._table.column_names]
        for batch in self._table.select(names).to_batches(max_chunksize=_SCAN_ROWS):
            yield from batch.to_pylist()

    def where(self, number: int) -> str:
        return f"{self._name}, row {number}"


def _read_row(table: Any, at: int) -> dict[str, Any]:
    row: dict[str, Any] = table.slice(at, 1).to_pylist()[0]
    return row


TaskRows = JsonlRows | ParquetRows | ArrowRows
"""Rows by number, with the names of the image columns, and the files that contain the rows."""


def image_columns(schema: Any) -> frozenset[str]:
    """Return the columns of images, or of lists of images."""
    notes = json.loads((schema.metadata or {}).get(FEATURES_KEY, b"{}"))
    features = notes.get("info", {}).get("features", {})
    return frozenset(name for name, feature in features.items() if _holds_images(feature))


def _holds_images(feature: Any) -> bool:
    if isinstance(feature, list):  # the list format of older versions
        return any(map(_holds_images, feature))
    if not isinstance(feature, dict):
        return False
    return feature.get("_type") == "Image" or _holds_images(feature.get("feature"))


def put_cell_images(value: Any, put: Put, folder: Path, where: str) -> Any:
    """Put a cell's images: bytes, a path below `folder`, a data URL, or a list of those."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [put_cell_images(v, put, folder, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return put(value)
    if isinstance(value, str) and value.startswith("data:"):
        return put(read_data_url(value))
    if isinstance(value, str) and value:
        return put(_get_path_below(folder, value, where))
    raise MediaRefused(
        f"{where}: expected an image, got a {type(value).__name__}",
        "use bytes, a path below the file's folder, or a data URL",
    )


def _get_path_below(folder: Path, name: str, where: str) -> Path:
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, or a cycle of links
        fix = "use a path without null bytes, relative to the file's folder"
        raise MediaRefused(f"{where}: invalid path {name[:80]!r}: {error}", fix) from error
    if not path.is_relative_to(root):
        raise MediaRefused(
            f"{where}: {name!r} is outside {folder}", "keep images below the folder of the file"
        )
    return path
