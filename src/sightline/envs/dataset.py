"""The environment `dataset`: rows of a file or a dataset with images, a question and an answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sightline.envs.protocol import Chat, Environment, Outcome, Task
from sightline.envs.rewards import build_reward
from sightline.envs.rewards.choices import format_options
from sightline.envs.rewards.text import find_answer, list_accepted
from sightline.envs.task_files import TaskFile, TaskRows, check_fractions, open_rows
from sightline.errors import ConfigError
from sightline.message import Message, assistant, system, user
from sightline.regular_file import open_file

IMAGE = "<image>"
"""Placeholder in a prompt for the row's next image."""
_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
SPLITS = ("train", "eval", "sft")
LEFT_OUT = "left out"
_CODES = (*SPLITS, LEFT_OUT)
"""Their indices stand for the splits of rows in the cache."""
_SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("eval", "test", "validation", "valid", "val", "dev"), "eval"),
    "sft": "sft",
}
"""Values of a split column, with the split that each means."""
HASH_CHARS = 32
CACHE_DIR = "~/.cache/sightline/splits"
MIN_CACHED_BYTES = 64_000_000
"""The size of a dataset's files from which its splits are cached."""


@dataclass(eq=False)
class Dataset(Environment):
    """One turn per row: the prompt with the row's images, and a reward for the answer."""

    name = "dataset"

    path: str
    prompt: str = "{question}"
    """Template of the user's message. `{column}` is a column's text, and `<image>` an image."""
    answer: str = "answer"
    images: Sequence[str] = ("image",)
    reward: str = "exact"
    reward_args: dict[str, Any] = field(default_factory=dict)
    answer_pattern: str = ""
    system: str = ""
    demonstration_column: str = ""
    """Column of the answers for `sightline sft`. Empty uses `answer`."""
    split: str = ""
    eval_path: str = ""
    eval_split: str = ""
    split_column: str = ""
    split_by: Sequence[str] = ()
    """Columns whose hash chooses the split. Empty uses the images, or else the prompt's columns."""
    eval_fraction: float = 0.1
    sft_fraction: float = 0.0
    max_chars: int = 0
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("images", "split_by"):
            if isinstance(column := getattr(self, name), str):
                raise ConfigError(
                    f"[env.args] {name} is not a list", f"write {name} = [{column!r}]"
                )
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ConfigError(f"[env.args] answer_pattern is invalid: {error}", "fix it") from error
        check_fractions(self.path, self.eval_fraction, self.sft_fraction)
        self.shows_media = bool(self.images)
        self._reward = build_reward(self.reward, self.reward_args, "[env.args] reward")
        self._prompt_columns = [name for name in dict.fromkeys(_FIELD.findall(self.prompt)) if name]
        if hidden := [c for c in (self.answer, *self.images) if c in self._prompt_columns]:
            what = "the answer" if hidden[0] == self.answer else "an image"
            raise ConfigError(
                f"[env.args] prompt shows the column {hidden[0]!r}, which is {what}",
                f"remove it. Braces are {{{{ and }}}}, and an image is {IMAGE}",
            )
        self._num_left_out = 0
        self._files = self._open_files()
        fractions = {"train": 1.0, "eval": self.eval_fraction, "sft": self.sft_fraction}
        for split, file in self._files.items():
            if fractions[split] and not file.count(split):
                raise ConfigError(
                    f"{self.path}: none of the {len(file)} rows is in the split {split!r}; "
                    f"{self._num_left_out} are longer than [env.args] max_chars",
                    "change the fractions, split_by (columns that differ), or the split column",
                )

    def task(self, index: int, split: str) -> Task:
        return Task(index, split, self._files[split].get_row_number(index, split))

    def describe_task(self, task: Task) -> str:
        file = self._files[task.split]
        row = file.read_raw(task.data)
        counts = ", ".join(f"{f.count(split)} {split}" for split, f in self._files.items())
        text = f"{file.where(task.data)}: {self.answer} = {row[self.answer]!r}"
        return f"{text}  (rows: {counts}, {self._num_left_out} left out)"

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        row, messages = await asyncio.to_thread(self._read, task, chat.put)
        text = (await chat.send(messages)).text
        answer = find_answer(text, self.answer_pattern) if self.answer_pattern else text
        if answer is None:
            return Outcome(0.0, {"right": 0.0, "malformed": 1.0})
        try:
            reward = await self._reward(answer, row[self.answer], row, chat)
        except ValueError as error:
            raise self._locate(task, self.answer, f"{error}") from error
        return Outcome(reward, {"right": reward, "malformed": 0.0})

    @property
    def has_demonstrations(self) -> bool:
        return self._files["sft"].count("sft") > 0

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        row, messages = self._read(task, put)
        column = self.demonstration_column or self.answer
        if row.get(column) in (None, []):
            raise self._locate(task, column, "the row has no value in this column")
        value, accepts_list = row[column], self.reward in ("exact", "fuzzy", "ocr", "math")
        is_text = isinstance(value, str) or accepts_list and not isinstance(value, dict)
        is_number = isinstance(value, int | float) and self.reward != "choice"
        text = _to_text(list_accepted(value)[0]) if is_text or is_number else ""
        if not text or self.answer_pattern and find_answer(text, self.answer_pattern) is None:
            problem = "the reward cannot read it as an answer. Set [env.args] demonstration_column"
            raise self._locate(task, column, problem)
        return [*messages, assistant(text)]

    def _read(self, task: Task, put: Any) -> tuple[dict[str, Any], list[Message]]:
        """Return a row with its prompt. This reads from disk."""
        row = self._files[task.split].read(task.data, put)
        cells = [row.get(column) for column in self.images]
        refs = [r for cell in cells for r in (cell if isinstance(cell, list) else [cell]) if r]
        texts = self._format(row).split(IMAGE)
        if len(texts) == 1:
            texts = [*[""] * len(refs), *texts]
        elif len(texts) - 1 != len(refs):
            problem = f"the prompt shows {len(texts) - 1} images, and the row has {len(refs)}"
            raise self._locate(task, ", ".join(self.images), problem)
        parts = [part for pair in zip(texts, [*refs, ""], strict=True) for part in pair if part]
        head = [system(self.system)] if self.system else []
        return row, [*head, user(*parts)]

    def _format(self, row: dict[str, Any]) -> str:
        def fill(match: re.Match[str]) -> str:
            return _to_text(row[match[1]]) if match[1] else match[0][0]

        return _FIELD.sub(fill, self.prompt)

    def _locate(self, task: Task, column: str, problem: str) -> ConfigError:
        where = self._files[task.split].where(task.data)
        return ConfigError(f"{where}, column {column!r}: {problem}", "fix or remove this row")

    def _open_files(self) -> dict[str, TaskFile]:
        """Return the file of each split. The splits may be parts of one file."""

        def open_part(path: str, part: str, eval_fraction: float) -> TaskFile:
            rows, folder = open_rows(path, part)
            codes = self._find_codes(rows, eval_fraction)
            numbers: dict[str, list[int]] = {split: [] for split in _CODES}
            for number, code in enumerate(codes):
                numbers[_CODES[code]].append(number)
            self._num_left_out += len(numbers.pop(LEFT_OUT))
            seed = self.seed if self.shuffle else None
            return TaskFile(rows, folder, self.images, numbers, seed)

        if not (self.eval_path or self.eval_split):
            return dict.fromkeys(SPLITS, open_part(self.path, self.split, self.eval_fraction))
        if (self.eval_path or self.path, self.eval_split) == (self.path, self.split):
            raise ConfigError(
                "[env.args] eval_path and eval_split name the training rows",
                "name other rows, or leave both empty and set eval_fraction or split_column",
            )
        file = open_part(self.path, self.split, 0.0)
        held_out = open_part(self.eval_path or self.path, self.eval_split, 1.0)
        return {"train": file, "eval": held_out, "sft": file}

    def _find_codes(self, rows: TaskRows, eval_fraction: float) -> bytes:
        """Return the code of each row's split. Those of large files are cached."""

        def compute() -> bytes:
            return bytes(_CODES.index(split) for split in self._split(rows, eval_fraction))

        stats = [file.stat() for file in rows.files]
        if sum(stat.st_size for stat in stats) < MIN_CACHED_BYTES:
            return compute()
        stamps = [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for stat in stats]
        key = _hash(repr((
            [file.absolute() for file in rows.files], stamps, self.prompt, self.answer, self.images,
            self.split_column, self.split_by, eval_fraction, self.sft_fraction, self.max_chars,
            self.seed,
        )))  # fmt: skip
        return _read_or_compute(Path(CACHE_DIR, key), len(rows), compute)

    def _split(self, rows: TaskRows, eval_fraction: float) -> Iterator[str]:
        """Yield the split of each row, or `LEFT_OUT` if it is too long. Raise for an invalid row.

        A hash chooses the split, so that rows with equal image cells share one.
        """
        needed = [*self._prompt_columns, self.answer, *self.split_by]
        needed += [self.split_column] if self.split_column else []
        is_drawn = eval_fraction + self.sft_fraction > 0 and eval_fraction < 1
        is_drawn = is_drawn and not self.split_column
        hashed = [*self.split_by] or [*self.images] or self._prompt_columns
        columns = dict.fromkeys([*needed, *(hashed if is_drawn else ())])
        for number, row in enumerate(rows.scan(list(columns))):
            missing = [column for column in needed if row.get(column) is None]
            if not number:
                missing += [column for column in self.images if column not in rows.row(0)]
            if missing:
                raise ConfigError(
                    f"{rows.where(number)} has no column {missing[0]!r}, or it is empty. The row "
                    f"has {', '.join(sorted(rows.row(number)))}",
                    "fix or remove the row, or set other columns in [env.args]",
                )
            length = len(self._format(row)) + len(_to_text(row[self.answer]))
            if self.max_chars and length > self.max_chars:
                yield LEFT_OUT
            elif self.split_column:
                yield self._read_split(rows, number, str(row[self.split_column]))
            else:
                cells = json.dumps([_drop_path(row.get(c)) for c in hashed], default=_hash)
                drawn = int(_hash(f"{self.seed}:{cells}"), 16) / 16**HASH_CHARS
                is_sft = drawn < eval_fraction + self.sft_fraction
                yield "eval" if drawn < eval_fraction else "sft" if is_sft else "train"

    def _read_split(self, rows: TaskRows, number: int, value: str) -> str:
        if value.lower() not in _SPLIT_OF:
            raise ConfigError(
                f"{rows.where(number)}, column {self.split_column!r}: {value!r} is not a split",
                f"use one of {', '.join(_SPLIT_OF)}",
            )
        return _SPLIT_OF[value.lower()]


def _read_or_compute(path: Path, size: int, compute: Callable[[], bytes]) -> bytes:
    """Return the `size` bytes of a cache file. Of several processes, one computes and writes them.

    The others wait for the lock of the file, which the kernel releases if that process ends.
    """
    try:
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_file(path, "a+b")
        fcntl.flock(file, fcntl.LOCK_EX)
    except (OSError, RuntimeError):  # there is no home, or it is read-only
        return compute()
    with file:
        file.seek(0)
        if len(data := file.read()) != size:
            data = compute()
            with contextlib.suppress(OSError):  # the disk is full
                file.truncate(0)
                os.write(file.fileno(), data)
    return data


def _to_text(cell: Any) -> str:
    """Return a cell's text in a prompt. A list is one of lettered options."""
    if isinstance(cell, list):
        return format_options(cell)
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)  # tables store a column of integers with gaps as floats
    return str(cell)


def _drop_path(cell: Any) -> Any:
    """Return the bytes of an image cell that has them, and any other cell as it is."""
    if isinstance(cell, list):
        return [_drop_path(inner) for inner in cell]
    return (cell.get("bytes") or cell) if isinstance(cell, dict) else cell


def _hash(value: Any) -> str:
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=HASH_CHARS // 2).hexdigest()


ENVIRONMENT = Dataset
