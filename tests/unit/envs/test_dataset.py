"""The dataset environment: prompts, splits, rewards, and errors that name the row."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from answering import ScriptedChat
from PIL import Image

from sightline.config import EnvConfig
from sightline.envs import Outcome
from sightline.envs.dataset import MIN_CACHED_BYTES, Dataset
from sightline.envs.protocol import build_environment, load_environment
from sightline.errors import ConfigError, MediaError
from sightline.media import MediaStore
from sightline.message import ImagePart, Message

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "datasets"


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def make_rows(folder: Path, count: int = 200) -> str:
    """A folder with rows that share an image by twos."""
    folder.mkdir(exist_ok=True)
    rows = []
    for n in range(count):
        Image.new("RGB", (32, 32), (n // 2, 0, 0)).save(folder / f"{n // 2}.png")
        image = f"{n // 2}.png"
        rows.append({"image": image, "question": f"q{n}", "answer": n, "part": "train"})
    return write_rows(folder, rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_rows(tmp_path_factory.mktemp("data") / "rows")


def play(env: Dataset, store: MediaStore, answer: str, index: int = 0, split: str = "train") -> Any:
    chat = ScriptedChat(store, [answer])
    outcome = asyncio.run(env.rollout(env.task(index, split), chat))  # type: ignore[arg-type]
    return outcome, chat.seen


def show(messages: list[Message]) -> list[Any]:
    """The parts of the messages: texts, and the red level of images."""
    return [
        part.ref.width if isinstance(part, ImagePart) else part.text  # type: ignore[union-attr]
        for message in messages
        for part in message.content
    ]


def rows_of(env: Dataset, split: str, count: int = 400) -> list[int]:
    return [env.task(i, split).data for i in range(count)]


def test_dataset_is_a_built_in_environment(folder: str, store: MediaStore) -> None:
    env = load_environment("dataset", {"path": folder})
    assert isinstance(env, Dataset) and env.shows_media and not env.has_demonstrations
    number = env.task(0, "train").data
    outcome, seen = play(env, store, f" {number}.")
    assert outcome == Outcome(1.0, {"right": 1.0, "malformed": 0.0})
    assert show(seen) == [32, f"q{number}"]
    assert play(env, store, "none of it")[0].reward == 0


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("{question}", [10, 20, "Which?"]),
        ("<image>before <image>{question}", [10, "before ", 20, "Which?"]),
        ("{question}<image> and <image>", ["Which?", 10, " and ", 20]),
        (r"{question} {choices} \boxed{} {{x}}", [10, 20, "Which? A. a\nB. 2 \\boxed{} {x}"]),
        ("{number}", [10, 20, "3"]),
        ("Name it.", [10, 20, "Name it."]),
    ],
)
def test_prompt_is_a_template_of_columns_and_images(
    prompt: str, shown: list[Any], tmp_path: Path, store: MediaStore
) -> None:
    for side in (10, 20):
        Image.new("RGB", (side, 32)).save(tmp_path / f"{side}.png")
    row = {"a": "10.png", "more": ["20.png"], "none": None, "question": "Which?", "answer": "x"}
    path = write_rows(tmp_path, [{**row, "choices": ["a", 2], "number": 3.0}])
    columns = ["a", "none", "more"]
    env = Dataset(path, prompt, images=columns, eval_fraction=0, system="Be short.")
    assert show(play(env, store, "x")[1]) == ["Be short.", *shown]


def test_prompt_that_shows_the_answer_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="prompt shows the column 'answer', which is the answer"):
        Dataset(folder, r"{question} End with \boxed{answer}.")
    Dataset(folder, r"{question} End with \boxed{{answer}}.")


def test_splits_are_disjoint_and_keep_an_image_together(folder: str) -> None:
    env = Dataset(folder, eval_fraction=0.2, sft_fraction=0.2)
    split_of: dict[int, str] = {}
    for split in ("train", "eval", "sft"):
        for number in rows_of(env, split):
            assert split_of.setdefault(number, split) == split
    assert len(split_of) == 200
    assert all(split_of[2 * n] == split_of[2 * n + 1] for n in range(100))
    sizes = Counter(split_of.values())
    assert 20 <= sizes["eval"] <= 60 and 20 <= sizes["sft"] <= 60
    # A row that is added changes no other row's split.
    longer = Dataset(make_rows(Path(folder).with_name("longer"), 220), eval_fraction=0.2)
    held_out = {number for number, split in split_of.items() if split == "eval"}
    assert held_out <= set(rows_of(longer, "eval"))
    other_seed = Dataset(folder, eval_fraction=0.2, seed=1)
    assert set(rows_of(other_seed, "eval")) != held_out


def test_split_by_chooses_the_columns_of_the_hash(tmp_path: Path) -> None:
    rows = [{"scan": n % 5, "question": str(n), "answer": "x"} for n in range(100)]
    path = write_rows(tmp_path, rows)
    env = Dataset(path, images=[], split_by=["scan"], eval_fraction=0.4)
    assert not env.shows_media
    train, held_out = ({n % 5 for n in rows_of(env, split)} for split in ("train", "eval"))
    assert train | held_out == set(range(5)) and not train & held_out


def test_a_column_or_another_file_names_held_out_rows(tmp_path: Path, folder: str) -> None:
    names = ["train", "Test", "validation", "sft"]
    rows = [{"question": "?", "answer": n, "part": names[n % 4]} for n in range(40)]
    path = write_rows(tmp_path / "by_column", rows)
    env = Dataset(path, images=[], split_column="part")
    parts = [{n % 4 for n in rows_of(env, split)} for split in ("train", "eval", "sft")]
    assert parts == [{0}, {1, 2}, {3}]

    others = write_rows(tmp_path / "others", rows[:3])
    env = Dataset(path, images=[], eval_path=others)
    assert set(rows_of(env, "train")) == set(range(40)) and set(rows_of(env, "eval")) == {0, 1, 2}
    assert "others" in env.describe_task(env.task(0, "eval"))
    with pytest.raises(ConfigError, match="name the training rows"):
        Dataset(path, images=[], eval_path=path)


@pytest.mark.parametrize("path", ["rows.parquet", "folder"])
def test_tables_of_the_datasets_library_are_read(path: str, store: MediaStore) -> None:
    split = "train" if path == "folder" else ""
    eval_split = "test" if path == "folder" else ""
    env = Dataset(
        str(GOLDEN / path), images=["image", "more"], split=split, eval_split=eval_split,
        eval_fraction=0.4,
    )  # fmt: skip
    number = env.task(0, "train").data
    outcome, seen = play(env, store, str(number))
    assert outcome.reward == 1
    assert show(seen) == [32 + number, *[16] * (number % 2), f"q{number}"]
    task = env.task(0, "eval")
    row = "row" if path.endswith("parquet") else f"{GOLDEN / 'folder'}, row"
    assert f"{row} {task.data}: answer = {task.data}" in env.describe_task(task)


def test_shuffling_can_be_turned_off(folder: str) -> None:
    env = Dataset(folder, eval_fraction=0, shuffle=False)
    assert rows_of(env, "train", 200) == list(range(200))
    again, shuffled = (rows_of(Dataset(folder, eval_fraction=0), "train", 400) for _ in range(2))
    assert again == shuffled and sorted(again[:200]) == sorted(again[200:]) == list(range(200))
    assert again[:200] != again[200:] and again[:200] != list(range(200))


def test_long_rows_are_left_out(tmp_path: Path) -> None:
    rows = [{"question": "x" * n, "answer": "yes"} for n in range(1, 11)]
    env = Dataset(write_rows(tmp_path, rows), images=[], eval_fraction=0, max_chars=8)
    assert set(rows_of(env, "train")) == set(range(5))  # "yes" counts too
    assert "5 train, 0 eval, 0 sft, 5 left out" in env.describe_task(env.task(0, "train"))


def test_answer_is_found_by_a_pattern(folder: str, store: MediaStore) -> None:
    env = Dataset(folder, answer_pattern="boxed", reward="number", reward_args={"absolute": 0.5})
    right = env.task(0, "train").data
    assert play(env, store, rf"1 + 1 = \boxed{{{right}.4}}")[0].reward == 1
    unmarked = play(env, store, str(right))[0]
    assert unmarked == Outcome(0.0, {"right": 0.0, "malformed": 1.0})


def test_demonstrations_answer_held_out_rows(tmp_path: Path, store: MediaStore) -> None:
    rows = [{"question": "?", "answer": ["yes", "y"], "why": "Because."} for _ in range(9)]
    path = write_rows(tmp_path, [{**row, "part": "sft"} for row in rows[1:]] + [
        {**rows[0], "part": "train"}
    ])  # fmt: skip
    options: dict[str, Any] = {"images": [], "split_column": "part", "eval_fraction": 0}
    env = Dataset(path, **options)
    assert env.has_demonstrations
    talk = env.demonstration(env.task(0, "sft"), store.put, random.Random(0))
    assert [message.text for message in talk] == ["?", "yes"]
    env = Dataset(path, **options, demonstration_column="why")
    talk = env.demonstration(env.task(0, "sft"), store.put, random.Random(0))
    assert [message.text for message in talk] == ["?", "Because."]
    env = Dataset(path, **options, demonstration_column="because")
    with pytest.raises(
        ConfigError,
        match="rows.jsonl, line 1, column 'because': the row has no value in this column",
    ):
        env.demonstration(env.task(0, "sft"), store.put, random.Random(0))


@pytest.mark.parametrize(
    ("answer", "args"),
    [
        ([0, 0, 10, 10], {"reward": "iou"}),
        (["a", "b"], {"reward": "set"}),
        ({"a": 1}, {"reward": "json"}),
        (1, {"reward": "choice"}),
        ("5", {"answer_pattern": "boxed"}),
    ],
)
def test_reference_that_earns_nothing_as_an_answer_is_no_demonstration(
    tmp_path: Path, store: MediaStore, answer: Any, args: dict[str, Any]
) -> None:
    row = {"question": "?", "answer": answer}
    path = write_rows(tmp_path, [{**row, "part": "sft"}, {**row, "part": "train"}])
    env = Dataset(path, images=[], split_column="part", eval_fraction=0, **args)
    with pytest.raises(ConfigError, match="the reward cannot read it as an answer"):
        env.demonstration(env.task(0, "sft"), store.put, random.Random(0))


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"images": "image"}, "images is not a list"),
        ({"split_by": "question"}, "split_by is not a list"),
        ({"answer_pattern": "["}, "answer_pattern is invalid: unterminated"),
        ({"reward": ":f"}, "does not name a module"),
    ],
)
def test_invalid_argument_is_refused_at_start(
    tmp_path: Path, args: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Dataset(write_rows(tmp_path, [ROW] * 9), **args)


def test_file_has_no_named_splits(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [ROW] * 9) + "/rows.jsonl"
    with pytest.raises(ConfigError, match="is a file, so it has no split 'test'"):
        Dataset(path, eval_split="test")


def test_copies_of_an_image_share_a_split(tmp_path: Path) -> None:
    rows = [{**ROW, "image": {"bytes": "same", "path": f"{n}.png"}} for n in range(99)]
    with pytest.raises(ConfigError, match="none of the 99 rows is in the split"):
        Dataset(write_rows(tmp_path, rows), eval_fraction=0.5)
    # A file without bytes names its images, and the name counts.
    rows = [{**ROW, "image": f"{n}.png"} for n in range(99)]
    assert rows_of(Dataset(write_rows(tmp_path, rows), eval_fraction=0.5), "eval")


def test_splits_of_a_large_file_are_cached_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    rows = [{"question": f"q{n}", "answer": "x" * (n % 2)} for n in range(40)]
    rows[0]["note"] = "x" * MIN_CACHED_BYTES
    path = write_rows(tmp_path / "rows", rows)
    args: dict[str, Any] = {"images": [], "eval_fraction": 0.3, "max_chars": 3}

    def read(**changes: Any) -> tuple[dict[str, list[int]], str]:
        env = Dataset(path, **args | changes)
        numbers = {split: sorted(set(rows_of(env, split))) for split in ("train", "eval")}
        return numbers, env.describe_task(env.task(0, "train")).partition("(")[2]

    first = read()
    assert first[1].endswith(" 15 left out)") and read() == first
    [cached] = (tmp_path / "home" / ".cache" / "sightline" / "splits").iterdir()
    codes = cached.read_bytes()
    assert sorted(codes) == sorted(
        [0] * len(first[0]["train"]) + [1] * len(first[0]["eval"]) + [3] * 15
    )
    cached.write_bytes(codes.replace(b"\3", b"\0"))  # as if a process had written this
    assert read()[1].endswith(" 0 left out)")
    assert read(seed=1)[0] != first[0]
    cached.write_bytes(codes[:-1])  # a full disk
    assert read() == first and cached.read_bytes() == codes
    cached.write_bytes(codes.replace(b"\3", b"\0"))
    (Path(path) / "rows.jsonl").touch()
    assert read() == first
    (tmp_path / "home").rename(tmp_path / "moved")
    (tmp_path / "home").touch()  # a home that is no folder
    assert read() == first


def test_split_column_reads_no_image_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = [{**ROW, "image": {"bytes": b"%d" % n, "path": None}, "part": "eval"} for n in range(9)]
    table = pyarrow.Table.from_pylist([{**row, "part": "train"} for row in rows] + rows)
    pyarrow.parquet.write_table(table, file, row_group_size=9)
    column = pyarrow.parquet.ParquetFile(file).metadata.row_group(1).column(0)
    with file.open("r+b") as written:  # damages the images after the first ones
        written.seek(column.dictionary_page_offset or column.data_page_offset)
        written.write(bytes(column.total_compressed_size))
    assert set(rows_of(Dataset(str(file), split_column="part"), "eval")) == set(range(9, 18))
    with pytest.raises(ConfigError, match="rows.parquet cannot be read"):
        Dataset(str(file))


ROW = {"image": "a.png", "question": "?", "answer": "x"}


@pytest.mark.parametrize(
    ("second", "args", "problem"),
    [
        ({"image": "a.png", "question": "?"}, {}, "line 2 has no column 'answer'"),
        ({**ROW, "answer": None}, {}, "line 2 has no column 'answer', or it is empty"),
        (ROW, {"prompt": "{problem}"}, "line 1 has no column 'problem'.* has answer, image, q"),
        (ROW, {"images": ["photo"]}, "line 1 has no column 'photo'"),
        (ROW, {"split_by": ["id"]}, "line 1 has no column 'id'"),
        ({**ROW, "part": "b"}, {"split_column": "part"}, "line 1 has no column 'part'"),
        (ROW, {"split_column": "answer"}, "line 1, column 'answer': 'x' is not a split"),
        (ROW, {"reward": "exat"}, r"\[env.args\] reward = 'exat' is not a built-in reward"),
        (ROW, {"max_chars": 1}, "none of the 2 rows is in the split 'train'; 2 are longer"),
        (ROW, {"split_by": ["answer"], "eval_fraction": 1e-9}, "is in the split 'eval'"),
        (ROW, {"colour": 1}, r"\[env.args\] does not fit 'dataset': .*colour"),
        (ROW, {"path": "nowhere"}, "there is no file or folder 'nowhere'"),
        (ROW, {"prompt": "{image}"}, "prompt shows the column 'image', which is an"),
    ],
)
def test_invalid_row_or_argument_is_refused_at_the_start(
    tmp_path: Path, second: dict[str, Any], args: dict[str, Any], problem: str
) -> None:
    path = write_rows(tmp_path, [ROW, second])
    with pytest.raises(ConfigError, match=problem):
        load_environment("dataset", {"path": path, "eval_fraction": 0, **args})


def test_line_that_is_not_json_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{json.dumps(ROW)}\n\n{{"image": \n')
    with pytest.raises(ConfigError, match="rows.jsonl, line 3: "):
        Dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "args", "kind", "problem"),
    [
        (ROW, {}, MediaError, "line 1, column 'image': .*a.png"),
        ({**ROW, "image": "../b.png"}, {}, MediaError, "line 1, column 'image': .* is outside"),
        ({**ROW, "image": 3}, {}, MediaError, "line 1, column 'image': expected an image, got a"),
        (
            {**ROW, "image": None},
            {"prompt": "<image>{question}"},
            ConfigError,
            "line 1, column 'image': the prompt shows 1 images, and the row has 0",
        ),
        (
            {**ROW, "image": None},
            {"reward": "number"},
            ConfigError,
            "line 1, column 'answer': the reference 'x' has no number",
        ),
    ],
)
def test_bad_row_fails_its_rollout_with_its_place(
    tmp_path: Path,
    store: MediaStore,
    row: dict[str, Any],
    args: dict[str, Any],
    kind: type[Exception],
    problem: str,
) -> None:
    env = Dataset(write_rows(tmp_path, [row]), eval_fraction=0, **args)
    with pytest.raises(kind, match=problem):
        play(env, store, "x")


def test_two_datasets_make_a_mix(folder: str, tmp_path: Path) -> None:
    others = write_rows(tmp_path, [{"question": "?", "answer": "x"}] * 3)
    mix = [
        {"name": "dataset", "args": {"path": folder}, "label": "red"},
        {"name": "dataset", "args": {"path": others, "images": [], "eval_fraction": 0}},
    ]
    env = build_environment(EnvConfig.model_validate({"mix": mix}))
    played = {env.choose_environment(index, "train")[0].name for index in range(20)}
    assert played == {"red", "dataset"}


def test_judge_key_in_reward_args_is_a_reference(folder: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-key-1234")
    args = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key": f"file:{tmp_path}/key"}
    load_environment("dataset", {"path": folder, "reward": "judge", "reward_args": args})
