"""Tasks from files. The parquet file and the folder were written by `datasets` itself."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from sightline.envs.task_files import open_tasks
from sightline.errors import ConfigError, MediaError, MediaRefused
from sightline.media import MediaStore

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "datasets"


def png(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(png((1, 0, 0)))
    url = "data:image/png;base64," + base64.b64encode(png((2, 0, 0))).decode()
    rows = [{"n": 0, "image": "shots/a.png"}, {"n": 1, "image": url}, {"n": 2, "image": None}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_jsonl_rows_load_images_by_path_and_data_url(jsonl: Path, store: MediaStore) -> None:
    tasks = open_tasks(jsonl, images=["image"], eval_fraction=0)
    assert len(tasks) == 3
    first, second, third = (tasks.read(n, store.put) for n in range(3))
    assert [row["n"] for row in (first, second, third)] == [0, 1, 2]
    assert store.get(first["image"]) == png((1, 0, 0))
    assert store.get(second["image"]) == png((2, 0, 0))
    assert third["image"] is None


@pytest.mark.parametrize("path", ["rows.parquet", "folder"])
def test_dataset_image_columns_are_stored(path: str, store: MediaStore) -> None:
    tasks = open_tasks(
        GOLDEN / path, dataset_split="train" if path == "folder" else "", eval_fraction=0
    )
    assert len(tasks) == 5
    for number in range(5):
        row = tasks.read(number, store.put)
        assert row["question"] == f"q{number}" and row["answer"] == number
        assert (row["image"].width, row["image"].height) == (32 + number, 32)
        assert store.image(row["image"]).getpixel((0, 0)) == (40 * number, 0, 0)
        assert [(ref.width, ref.height) for ref in row["more"]] == [(16, 16)] * (number % 2)


def test_parquet_is_read_by_row_group(tmp_path: Path, store: MediaStore) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"n": list(range(10))})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    tasks = open_tasks(tmp_path / "t.parquet", eval_fraction=0)
    assert [tasks.read(n, store.put)["n"] for n in (9, 0, 3, 2, 8)] == [9, 0, 3, 2, 8]


def test_splits_are_disjoint_and_wrap_around(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"n": n}) for n in range(100)))
    tasks = open_tasks(path, eval_fraction=0.2, sft_fraction=0.1, seed=3)
    rows = {s: {tasks.get_row_number(i, s) for i in range(300)} for s in ("train", "eval", "sft")}
    assert [len(rows[s]) for s in ("train", "eval", "sft")] == [70, 20, 10]
    assert set.union(*rows.values()) == set(range(100))
    again = open_tasks(path, eval_fraction=0.2, sft_fraction=0.1, seed=3)
    assert [again.get_row_number(i, "train") for i in range(9)] == [
        tasks.get_row_number(i, "train") for i in range(9)
    ]
    with pytest.raises(ConfigError, match="the split 'sft' has no rows"):
        open_tasks(path).get_row_number(0, "sft")
    for eval_fraction, sft_fraction in ((-0.1, 0.0), (1.5, 0.0), (0.7, 0.7), (float("nan"), 0.0)):
        with pytest.raises(ConfigError, match="eval_fraction"):
            open_tasks(path, eval_fraction=eval_fraction, sft_fraction=sft_fraction)


@pytest.mark.parametrize("name", ["../outside.png", "/etc/passwd", "way/../../outside.png"])
def test_path_outside_the_folder_is_refused(tmp_path: Path, store: MediaStore, name: str) -> None:
    (tmp_path / "outside.png").write_bytes(png((1, 1, 1)))
    path = tmp_path / "in" / "t.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"image": name}))
    with pytest.raises(MediaRefused, match="t.jsonl, line 1, column 'image': .* is outside"):
        open_tasks(path, images=["image"], eval_fraction=0).read(0, store.put)


def test_link_outside_the_folder_is_refused(tmp_path: Path, store: MediaStore) -> None:
    (tmp_path / "outside.png").write_bytes(png((1, 1, 1)))
    path = tmp_path / "in" / "t.jsonl"
    path.parent.mkdir()
    (path.parent / "a.png").symlink_to(tmp_path / "outside.png")
    path.write_text(json.dumps({"image": "a.png"}))
    with pytest.raises(MediaRefused, match="is outside"):
        open_tasks(path, images=["image"], eval_fraction=0).read(0, store.put)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("t.csv", "a,b", "unsupported file type '.csv'"),
        ("t.jsonl", "", "no rows"),
        ("missing.jsonl", None, "there is no file or folder '.*missing.jsonl'"),
        ("missing", None, "there is no file or folder"),
    ],
)
def test_invalid_task_file_is_refused(
    tmp_path: Path, name: str, text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        open_tasks(tmp_path / name)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the Hub has it: two splits in parquet shards."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    cells = [{"question": str(i), "image": {"bytes": png((i, 0, 0)), "path": None}} for i in (0, 1)]
    rows = datasets.Dataset.from_list(cells).cast_column("image", datasets.Image())
    folder = tmp_path / "owner" / "name" / "data"
    folder.mkdir(parents=True)
    for number in range(2):
        part = rows.select([number])
        part.to_parquet(folder / f"train-{number:05d}-of-00002.parquet")
    rows.select([0]).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder.parent


def test_a_folder_of_shards_is_one_data_set(shards: Path, store: MediaStore) -> None:
    tasks = open_tasks(shards)
    assert len(tasks) == 2 and len(open_tasks(shards, "test")) == 1
    assert [tasks.read(i, store.put)["question"] for i in (0, 1)] == ["0", "1"]
    assert store.get(tasks.read(1, store.put)["image"]) == png((1, 0, 0))
    with pytest.raises(ConfigError, match="'dev'.*Should be one of"):
        open_tasks(shards, "dev")


def test_unreachable_hub_dataset_is_refused_with_a_fix() -> None:
    with pytest.raises(ConfigError, match="nobody/nothing, split 'train': .*reach") as refused:
        open_tasks("nobody/nothing")
    assert "network" in refused.value.fix


def test_datasets_library_is_an_extra(shards: Path) -> None:
    script = "import sys; sys.modules['datasets'] = None\n"
    script += "from sightline.envs.task_files import open_tasks; open_tasks(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(shards)], capture_output=True, text=True, timeout=60
    )
    assert "pip install 'sightline-rl[datasets]'" in done.stderr


def test_dataset_folder_part_can_be_selected(store: MediaStore) -> None:
    assert len(open_tasks(GOLDEN / "folder", dataset_split="test", eval_fraction=0)) == 2
    assert len(open_tasks(GOLDEN / "folder" / "test", eval_fraction=0)) == 2
    with pytest.raises(ConfigError, match="It has train, test"):
        open_tasks(GOLDEN / "folder")


def test_non_json_line_is_named(tmp_path: Path, store: MediaStore) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"n": 1}\n{"n":\n')
    with pytest.raises(ConfigError, match="t.jsonl, line 2: "):
        open_tasks(path, eval_fraction=0).read(1, store.put)


def test_a_folder_with_one_file_of_rows_is_that_file(jsonl: Path, store: MediaStore) -> None:
    assert open_tasks(jsonl.parent, images=["image"], eval_fraction=0).read(0, store.put)["n"] == 0
    (jsonl.parent / "others.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(ConfigError, match="several files of rows: others.jsonl, tasks.jsonl"):
        open_tasks(jsonl.parent)


def test_errors_name_the_line_of_the_file(jsonl: Path, store: MediaStore) -> None:
    tasks = open_tasks(jsonl, images=["image"], eval_fraction=0)
    assert [tasks.where(n).rpartition(", ")[2] for n in range(3)] == ["line 1", "line 3", "line 5"]
    (jsonl.parent / "shots" / "a.png").write_bytes(b"no image")
    with pytest.raises(MediaError, match="tasks.jsonl, line 1, column 'image': "):
        tasks.read(0, store.put)


def test_each_epoch_has_its_own_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"n": n}) for n in range(20)))

    def order(seed: int, *epochs: int) -> list[list[int]]:
        tasks = open_tasks(path, eval_fraction=0, seed=seed)
        return [[tasks.get_row_number(20 * k + i, "train") for i in range(20)] for k in epochs]

    first, second = order(0, 0, 1)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert order(0, 1, 0) == [second, first]  # as after a resume in the second epoch
    assert order(1, 0) != [first]
