"""`sightline model random`, and its short form for the smallest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sightline.cli.main import main


def test_tiny_writes_a_checkpoint_and_prints_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "tiny"
    assert main(["model", "tiny", str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "parameters" in first and second == f"model: {folder}"
    assert json.loads((folder / "config.json").read_text())["model_type"]
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_random_writes_the_shape_type_and_dtype_of_its_options(tmp_path: Path) -> None:
    command = ["model", "random", str(tmp_path / "m"), "--like", "tiny", "--type", "qwen3_5"]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3_5", "bfloat16")


def test_random_names_the_shapes_that_it_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "random", str(tmp_path / "m"), "--like", "qwen9"]) == 2
    assert "qwen3-vl-30b-a3b" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_tiny_replaces_a_checkpoint_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    assert main(["model", "tiny", str(folder)]) == 0
    (folder / "mine.txt").write_text("kept unless forced")
    assert main(["model", "tiny", str(folder)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (folder / "mine.txt").exists()
    assert main(["model", "tiny", str(folder), "--force", "--seed", "1"]) == 0
    assert not (folder / "mine.txt").exists()


def test_tiny_never_replaces_a_non_checkpoint_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["model", "tiny", str(tmp_path), "--force"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
