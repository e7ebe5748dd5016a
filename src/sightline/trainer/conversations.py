"""Conversations to imitate: demonstrations of an environment, or the rows of a file.

An index gives the same conversation in every process and after every restart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sightline.config import DataConfig
from sightline.envs import Environment
from sightline.envs.protocol import Tools
from sightline.envs.task_files import open_tasks, put_cell_images
from sightline.errors import MediaError, MessageError
from sightline.media import MediaRef, MediaStore
from sightline.media.video import find_video_mime
from sightline.message import (
    ImageResolver,
    Message,
    put_images,
    to_messages,
)
from sightline.message.read import IMAGE_KINDS, VIDEO_KINDS, get_image_source
from sightline.regular_file import open_file

TRAIN, HELD_OUT = "train", "eval"
_CELL_KEYS = {"bytes", "path"}
"""Keys of an image in the `datasets` library."""
_PLACEHOLDER = "<image>"
"""ShareGPT's placeholder in a text for the row's next image."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}

Put = Callable[[Any], MediaRef]


@dataclass(frozen=True)
class TrainingConversation:
    name: str
    """The name in messages and metrics, different for every draw."""
    messages: list[Message]
    tools: Tools | None = None
    rejected: list[Message] | None = None
    """The worse conversation of a pair."""

    @property
    def shows_media(self) -> bool:
        return any(message.refs for message in self.messages)


class Demonstrations:
    """The demonstrations of an environment. None is held out."""

    num_held_out = 0

    def __init__(self, env: Environment, store: MediaStore, seed: int) -> None:
        self._env, self._store, self._seed = env, store, seed

    def name(self, index: int, split: str) -> str:
        return f"sft.{index}"

    def conversation(self, index: int, split: str) -> TrainingConversation:
        # Not the seed that an environment uses for a task: the same draws would leak the task.
        rng = random.Random(f"{self._seed}:demonstration:{index}")
        env, number = self._env.choose_environment(index, "sft")
        demonstration = env.demonstration(env.task(number, "sft"), self._store.put, rng)
        messages = put_images(demonstration, self._store.put)
        return TrainingConversation(self.name(index, split), messages, env.tools)


class FileConversations:
    """Conversations from the rows that `open_tasks` opens.

    A row has its messages in OpenAI's or ShareGPT's format. An image part without a source, or a
    placeholder in a text, takes the next image of the row's image column. A part with an `index`,
    as in TRL, takes that image.
    """

    def __init__(self, data: DataConfig, put: Put, resolver: ImageResolver, seed: int) -> None:
        self._data, self._put, self._resolver = data, put, resolver
        path = Path(data.path)
        self._folder = path.parent if path.is_file() else path
        self._rows = open_tasks(
            data.path,
            data.split,
            (data.images_column,),
            eval_fraction=data.eval_fraction,
            seed=seed,
        )
        self.num_held_out = self._rows.count(HELD_OUT)
        self._rows.get_row_number(0, TRAIN)  # raises if no row is left for training

    def name(self, index: int, split: str) -> str:
        # A batch may draw a row twice, and names identify samples.
        return f"row {self._rows.get_row_number(index, split)} draw {index}"

    def conversation(self, index: int, split: str) -> TrainingConversation:
        conversation = self.row(self._rows.get_row_number(index, split))
        return replace(conversation, name=self.name(index, split))

    def row(self, number: int) -> TrainingConversation:
        row = self._rows.read(number, self._put)
        try:
            return self._convert_row(row, f"row {number}")
        except (MediaError, MessageError) as error:
            where = self._rows.where(number)
            raise type(error)(f"{where}: {error.problem}", error.fix) from error

    def __len__(self) -> int:
        return len(self._rows)

    def _convert_row(self, row: dict[str, Any], name: str) -> TrainingConversation:
        rejected = None
        if self._data.rejected_column:
            rejected = self._convert_column(row, self._data.rejected_column)
        messages = self._convert_column(row, self._data.messages_column)
        tools = _decode_cell(row["tools"], "tools") if row.get("tools") else None
        return TrainingConversation(name, messages, tools, rejected)

    def _convert_column(self, row: dict[str, Any], column: str) -> list[Message]:
        if row.get(column) is None and column == "messages" and "conversations" in row:
            column = "conversations"
        if row.get(column) is None:
            raise MessageError.at(
                column,
                f"it is missing; the row has {', '.join(sorted(row))}",
                "set [data] messages_column",
            )
        images = row.get(self._data.images_column) or []
        images = images if isinstance(images, list) else [images]
        row_images = _RowImages(images, self._put, self._folder)
        cell = _decode_cell(row[column], column)
        if self._data.rejected_column and row.get("prompt"):
            cell = [*_decode_cell(row["prompt"], "prompt"), *cell]
        filled = row_images.fill(cell)
        if "image_digests" not in row:  # written by `sightline samples`: images of all branches
            row_images.check_all_used()
        messages = to_messages(filled, self._resolver)
        if not any(message.role == "assistant" for message in messages):
            raise MessageError.at(column, "the assistant says nothing", "remove the row")
        if not images and not any(message.refs for message in messages):
            for name in ("image", "images"):
                if name != self._data.images_column and row.get(name):
                    fix = f'set [data] images_column = "{name}", or rename the column'
                    raise MessageError.at(name, "no message shows this image", fix)
        return messages


ConversationSource = Demonstrations | FileConversations
"""An endless source of training conversations; `num_held_out` others are held out."""


class _RowImages:
    """Puts the images of a row into the parts that show them."""

    def __init__(self, images: Sequence[MediaRef], put: Put, folder: Path) -> None:
        self._images, self._put, self._folder = images, put, folder
        self._used: list[int] = []

    def fill(self, messages: Any) -> Any:
        """Return the messages with refs in place of images. Other values stay as they are."""
        if not isinstance(messages, list):
            return messages
        return [self._message(m, f"messages[{i}]") for i, m in enumerate(messages)]

    def check_all_used(self) -> None:
        if unused := set(range(len(self._images))).difference(self._used):
            raise MessageError.at(
                "messages",
                f"{len(self._used)} image parts take an image of the row, which has "
                f"{len(self._images)}: image {min(unused)} is not shown",
                'show each with a part {"type": "image"}, or with <image> in a text',
            )

    def _message(self, message: Any, path: str) -> Any:
        if not isinstance(message, dict):
            return message
        # Tables have every key in every row: missing values are null.
        message = {key: value for key, value in message.items() if value is not None}
        if is_sharegpt := "from" in message and "role" not in message:
            speaker = message.pop("from")
            if speaker not in _SHAREGPT_ROLES:
                known = " or ".join(_SHAREGPT_ROLES)
                raise MessageError.at(f"{path}.from", f"{speaker!r} is no role", f"use {known}")
            message |= {"role": _SHAREGPT_ROLES[speaker], "content": message.pop("value", None)}
        parts = message.get("content")
        if isinstance(parts, str) and _PLACEHOLDER in parts and (self._images or is_sharegpt):
            texts = [{"type": "text", "text": text} for text in parts.split(_PLACEHOLDER)]
            parts = [part for text in texts for part in ({"type": "image"}, text)][1:]
            parts = [part for part in parts if part.get("text") != ""]
        if isinstance(parts, list):
            path = f"{path}.content"
            parts = [self._part(part, f"{path}[{i}]") for i, part in enumerate(parts)]
            message["content"] = parts
        return message

    def _part(self, part: Any, path: str) -> Any:
        if not isinstance(part, dict) or part.get("type") not in IMAGE_KINDS + VIDEO_KINDS:
            return part
        what = "image" if part["type"] in IMAGE_KINDS else "video"
        sources = {k: v for k, v in part.items() if k not in ("type", "text") and v is not None}
        if what == "image" and sources.keys() <= {"index"}:
            return {"type": "image", "image": self._take(sources.get("index"), path)}
        for key, value in sources.items():
            if isinstance(value, dict) and value and value.keys() <= _CELL_KEYS:
                cell = put_cell_images(value, self._put, self._folder, f"{path}.{key}")
                return {"type": what, what: cell}
        if part.get("frames") is None:
            get_image_source(part, path, what)  # raises, with the path, if there is none
        return part

    def _take(self, index: int | None, path: str) -> MediaRef:
        """Return image `index` of the row, or the next one."""
        at = len(self._used) if index is None else index
        if not isinstance(at, int) or at not in range(len(self._images)):
            raise MessageError.at(
                path,
                f"image part {len(self._used) + 1} without a source asks for image {at}, and the "
                f"row has {len(self._images)} images",
                "give it a url, or the row an image more ([data] images_column names the column)",
            )
        self._used.append(at)
        return self._images[at]


def _decode_cell(cell: Any, path: str) -> Any:
    """Return the value of a cell. Some tables hold nested values as JSON text."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except ValueError as error:
        raise MessageError.at(path, f"the text is not JSON: {error}", "fix the row") from error


class _PlaceholderResolver:
    """Resolves every url to a placeholder. Files must exist, and nothing is fetched."""

    image = MediaRef("0" * 64, "image/png", 64, 64, 1)
    video = MediaRef("0" * 64, "video/mp4", 64, 64, 1, 8, 2.0)

    def put(self, source: Any) -> MediaRef:
        if isinstance(source, Path):
            if not source.is_file():
                raise MediaError(f"there is no image at {source}", "put it there, or fix the row")
            with open_file(source) as file:
                source = file.read(16)
        is_video = isinstance(source, bytes) and find_video_mime(source) is not None
        return self.video if is_video else self.image

    def resolve(self, url: str, path: str, takes_video: bool) -> MediaRef:
        """Choose the placeholder by the part's type, without fetching the url."""
        return self.video if takes_video else self.image


def check_rows_for_images(data: DataConfig, seed: int) -> bool:
    """Check the first 200 rows, and return whether they show images. Nothing is stored.

    Raise if one of them is not a conversation.
    """
    resolver = _PlaceholderResolver()
    conversations = FileConversations(data, resolver.put, resolver, seed)
    rows = [conversations.row(i) for i in range(min(200, len(conversations)))]
    return any(row.shows_media for row in rows)
