"""Conversations from JSONL, parquet and folders are equal, and errors name their place."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from synthetic_run import SyntheticSize, write_synthetic_run
from videos import encode_video, noise_frames

from sightline.config import DataConfig
from sightline.errors import MediaError, MessageError
from sightline.media import ImageIngestor, MediaStore
from sightline.message import VideoPart
from sightline.trace import read_traces
from sightline.trainer.conversations import (
    HELD_OUT,
    TRAIN,
    FileConversations,
    check_rows_for_images,
)
from sightline.view.parquet_export import export_samples

SIDE = 64


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def rows(num: int = 6) -> list[dict[str, Any]]:
    """Each shows two images, and contains its own number."""
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    return [
        {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [{"type": "text", "text": f"shade {i}"}]},
            ],
            "images": [{"bytes": png(i), "path": None}, {"bytes": png(100 + i), "path": None}],
        }
        for i in range(num)
    ]


def write_jsonl(path: Path, rows_of_file: list[dict[str, Any]]) -> Path:
    def plain(row: dict[str, Any]) -> dict[str, Any]:
        cells = [
            "data:image/png;base64," + base64.b64encode(cell["bytes"]).decode()
            for cell in row["images"]
        ]
        return row | {"images": cells}

    path = path / "talks.jsonl"
    path.write_text("".join(json.dumps(plain(row)) + "\n" for row in rows_of_file))
    return path


def table_of(rows_of_file: list[dict[str, Any]]) -> Any:
    """With the notes that the `datasets` library writes into a schema."""
    table = pyarrow.Table.from_pylist(rows_of_file)
    features = {"images": {"_type": "List", "feature": {"_type": "Image"}}}
    notes = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": notes})


def write_parquet(path: Path, rows_of_file: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(table_of(rows_of_file), path / "talks.parquet", row_group_size=2)
    return path / "talks.parquet"


def write_folder(path: Path, rows_of_file: list[dict[str, Any]]) -> Path:
    folder = path / "talks"
    datasets.Dataset(datasets.table.InMemoryTable(table_of(rows_of_file))).save_to_disk(folder)
    return folder


def opened(path: Path, store: MediaStore, **changes: Any) -> FileConversations:
    resolver = ImageIngestor(store)
    return FileConversations(DataConfig(path=str(path), **changes), store.put, resolver, seed=0)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_folder])
def test_row_is_the_same_conversation_in_every_file_format(
    tmp_path: Path, store: MediaStore, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    talks = opened(write(tmp_path, rows()), store)
    for number in range(6):
        talk = talks.row(number)
        user, assistant = talk.messages
        assert [store.get(ref) for ref in user.images] == [png(number), png(100 + number)]
        assert user.text == "and" and assistant.text == f"shade {number}"
        assert talk.shows_media and talk.name == f"row {number}"


def test_cells_may_contain_json_and_tools(tmp_path: Path, store: MediaStore) -> None:
    call = {"type": "function", "function": {"name": "press", "arguments": {"x": 1}}}
    talk = [
        {"role": "user", "content": "press", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "press", "parameters": {}}}]
    row = {"messages": json.dumps(talk), "tools": json.dumps(tools)}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "t.parquet")
    parsed_row = opened(tmp_path / "t.parquet", store).row(0)
    assert parsed_row.tools == tools and parsed_row.messages[1].tool_calls[0].name == "press"


def bad_row(content: Any, images: int = 0) -> dict[str, Any]:
    parts = [{"type": "text", "text": "x"}]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": parts}]
    return {"messages": talk, "images": [{"bytes": png(i)} for i in range(images)]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (bad_row([{"type": "file", "file": "x"}]), r"messages\[0\].content\[0\].type: 'file'"),
        (bad_row([{"text": "no type"}]), r"messages\[0\].content\[0\].type: it is missing"),
        (
            bad_row([{"type": "image", "image": 3}]),
            r"content\[0\].image: expected a URL, got a int",
        ),
        (bad_row([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]), "not allowed"),
        (
            bad_row([{"type": "image_url", "image_url": {"url": "ftp://x"}}]),
            "is not a url of an image",
        ),
        (bad_row([{"type": "image"}]), r"content\[0\]: image part 1 without a source.* 0 images"),
        (bad_row("no part", images=2), "0 image parts take an image of the row, which has 2"),
        (bad_row([{"type": "image", "index": 0.0}], images=1), "asks for image 0.0"),
        (bad_row("x") | {"image": "a.png"}, "image: no message shows this image"),
        (bad_row([{"type": "text"}]), r"messages\[0\].content\[0\].text"),
        ({"messages": [{"role": "user", "content": "x"}], "images": []}, "assistant says"),
        ({"messages": [{"role": "owner", "content": "x"}], "images": []}, r"messages\[0\].role"),
        ({"messages": 7, "images": []}, "messages: its type is int"),
        ({"texts": [], "images": []}, "messages: it is missing; the row has images, texts"),
    ],
)
def test_bad_parts_are_refused_with_their_path(
    tmp_path: Path, store: MediaStore, row: dict[str, Any], problem: str
) -> None:
    path = write_jsonl(tmp_path, [*rows(1), row])
    talks = opened(path, store)
    talks.row(0)
    with pytest.raises((MessageError, MediaError), match=rf"talks.jsonl, line 2[:,] .*{problem}"):
        talks.row(1)


def test_every_epoch_has_every_row_once_except_held_out_ones(
    tmp_path: Path, store: MediaStore
) -> None:
    talks = opened(write_jsonl(tmp_path, rows(10)), store, eval_fraction=0.3)
    assert talks.num_held_out == 3

    def draw(i: int, split: str) -> str:
        return talks.name(i, split).removesuffix(f" draw {i}")

    names = {draw(i, HELD_OUT) for i in range(3)}
    epochs = [[draw(7 * e + i, TRAIN) for i in range(7)] for e in range(3)]
    assert all(set(epoch) | names == {f"row {n}" for n in range(10)} for epoch in epochs)
    assert len(names) == 3 and epochs[0] != epochs[1] != epochs[2]
    for split, num in ((HELD_OUT, 3), (TRAIN, 7)):
        for i in range(num):
            talk, row = talks.conversation(i, split), draw(i, split).removeprefix("row ")
            assert talk.name == talks.name(i, split)
            assert talk.messages == talks.row(int(row)).messages
    again = opened(tmp_path / "talks.jsonl", store, eval_fraction=0.3)
    assert again.name(15, TRAIN) == f"{epochs[2][1]} draw 15", "whatever was asked for before"


def test_part_index_selects_an_image_of_the_row(tmp_path: Path, store: MediaStore) -> None:
    """TRL writes every part with every key, null if there is no value."""
    parts = [
        {"type": "image", "text": None, "index": 1},
        {"type": "text", "text": "before", "index": None},
        {"type": "image", "text": None, "index": 0},
    ]
    path = write_parquet(tmp_path, [bad_row(parts, images=2), bad_row(parts[:2], images=2)])
    talks = opened(path, store)
    message = talks.row(0).messages[0]
    assert [store.get(ref) for ref in message.images] == [
        png(1),
        png(0),
    ] and message.text == "before"
    with pytest.raises(MessageError, match="row 1: messages: .* image 0 is not shown"):
        talks.row(1)
    (tmp_path / "more").mkdir()
    path = write_parquet(tmp_path / "more", [bad_row([{"type": "image", "index": 2}], images=2)])
    with pytest.raises(MessageError, match=r"row 0: messages\[0\].content\[0\]: .* image 2, and"):
        opened(path, store).row(0)


def sharegpt(*turns: tuple[str, str], images: int = 0) -> dict[str, Any]:
    talk = [{"from": speaker, "value": value} for speaker, value in turns]
    return {"conversations": talk, "images": [{"bytes": png(i)} for i in range(images)]}


def test_sharegpt_conversations_place_images_at_placeholders(
    tmp_path: Path, store: MediaStore
) -> None:
    talk = [("system", "be brief"), ("human", "<image>\nand <image>?"), ("gpt", "both")]
    path = write_jsonl(tmp_path, [sharegpt(*talk, images=2)])
    system, user, messages = opened(path, store).row(0).messages
    assert [m.role for m in (system, user, messages)] == ["system", "user", "assistant"]
    assert [getattr(p, "text", "image") for p in user.content] == ["image", "\nand ", "image", "?"]
    assert [store.get(ref) for ref in user.images] == [png(0), png(1)] and messages.text == "both"
    plain = bad_row("<image>what?", images=1)
    path = write_jsonl(tmp_path, [plain])
    assert len(opened(path, store).row(0).messages[0].images) == 1, "in OpenAI's form as well"


def test_output_of_sightline_samples_can_be_read(tmp_path: Path, store: MediaStore) -> None:
    run_dir = write_synthetic_run(
        tmp_path / "run-001", SyntheticSize(steps=1, rollouts_per_step=8, images=4, conversations=8)
    )
    (name, _), *_ = export_samples(run_dir)
    path = run_dir.samples / name
    assert check_rows_for_images(DataConfig(path=str(path)), seed=0)
    talks = opened(path, store)
    for number, trace in enumerate(read_traces(run_dir.traces_of(1))):
        refs = [ref for message in talks.row(number).messages for ref in message.images]
        nodes = [trace.nodes[node] for node in trace.path(trace.turns[-1].id)]
        assert refs == [ref for node in nodes for ref in node.message.images]


def test_rows_may_contain_videos(tmp_path: Path) -> None:
    """As a cell with bytes, as a path below the folder, as a url, and as images with times."""
    clip = encode_video(noise_frames(4, 32, 32))
    (tmp_path / "clip.mp4").write_bytes(clip)
    url = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    image = "data:image/png;base64," + base64.b64encode(png(3)).decode()
    frames = [{"image_url": image, "seconds": 0}, {"image_url": image, "seconds": 1}]
    messages = {"role": "assistant", "content": "ok"}
    parts = [
        {"type": "video", "video": {"path": "clip.mp4"}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "frames": frames},
    ]
    lines = [{"messages": [{"role": "user", "content": [part]}, messages]} for part in parts]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(path=str(path), eval_fraction=0.0)
    assert check_rows_for_images(data, seed=0)
    store = MediaStore(tmp_path / "media")
    found = FileConversations(data, store.put, ImageIngestor(store), seed=0)
    shown = [found.row(i).messages[0].content[0] for i in range(3)]
    assert sum(part == VideoPart(ref=store.put(clip)) for part in shown) == 2
    assert sum(isinstance(part, VideoPart) and len(part.frames) == 2 for part in shown) == 1
