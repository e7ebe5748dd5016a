"""`sightline try` finds an environment's errors. `sightline init` writes a working environment."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import serve_here

from sightline import open_run
from sightline.cli.main import main
from sightline.config import RunFile, SftFile, load_config
from sightline.launch import evaluate
from sightline.run import RunDir
from sightline.trace import read_traces

BAD = """
import random
from PIL import Image
from sightline import Environment, Outcome, Task, assistant, user

FAULTS = ["well", "raises", "random", "nan", "blind", "long", "turns", "silent"]


class Bad(Environment):
    name = "bad"

    def task(self, index, split):
        fault = FAULTS[index]
        return Task(index, split, (fault, random.random() if fault == "random" else 0))

    async def rollout(self, task, chat):
        fault, _ = task.data
        side = 2000 if fault == "long" else 32
        if fault == "silent":
            return 1.0
        if fault == "well":
            return await chat.send([user("page.png", "What?", Image.new("RGB", (32, 32)))]) and 1.0
        await chat.send([user("?") if fault == "blind" else user(Image.new("RGB", (side, side)))])
        if fault == "raises":
            return 1 / 0  # here
        if fault == "turns":
            return Outcome(1.0, per_turn=[1.0, 2.0])
        return {"nan": float("nan")}.get(fault, 1.0)

    def demonstration(self, task, put, rng):
        return [user("?"), *([assistant("x")] if task.index else [])]
"""
PROBLEMS = [
    "demonstration 0: it has no assistant message",
    "task 1: ZeroDivisionError: division by zero\n    {file}:25 in rollout: return 1 / 0  # here\n",
    "task 2: two calls of task() differ: Task(2, 'train', ('random', ",
    "task 3: environment 'bad' returned Outcome(nan)\n  fix: return finite numbers only",
    "task 4: no image was sent, but shows_media is True",
    "task 5: the prompt of turn 1 is too long: it has 38",
    "task 6: 2 per_turn rewards for 1 model calls",
    "task 7: the rollout did not call the model",
]


def test_try_reports_environment_errors(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(evaluate, "temporary_server", serve_here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "bad_environment.py"
    file.write_text(BAD)
    Image.new("RGB", (8, 8)).save("page.png")
    words = ["try", "bad_environment:Bad", "--model", str(tiny_model), "--tasks", "8"]
    assert main(words) == 1
    output = capsys.readouterr().out
    problems = [part.split("\n\n")[0] for part in output.split("problem in ")[1:]]
    assert len(problems) == len(PROBLEMS)
    for problem, expected in zip(problems, PROBLEMS, strict=True):
        assert (problem + "\n").startswith(expected.format(file=file)), problem
    assert output.count("warning in ") == 1
    assert "warning in task 0: 'page.png' is sent as text" in output and "--max-pixels" in output
    assert "[image " in output and "prompt 11, 16 sampled" in output and "\x1b" not in output
    assert output.rstrip().endswith("view it: sightline view runs/try-bad-001")
    run = open_run("runs/try-bad-001")
    assert len(run.rollouts) == 8 and run.problems == []
    assert "finished" in repr(run), "as the dashboard's overview has it"
    assert main(["ls", "runs"]) == 0
    assert re.search(r"^try-bad-001 +finished +try, 8 tasks ", capsys.readouterr().out, re.M)


def test_try_shows_the_first_rows_of_a_dataset_with_their_images(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(evaluate, "temporary_server", serve_here)
    monkeypatch.chdir(tmp_path)
    rows, digests = [], []
    for n in range(5):
        Image.new("RGB", (64, 32 * (n + 1)), (50 * n, 0, 0)).save(f"{n}.png")
        digests.append(hashlib.sha256(Path(f"{n}.png").read_bytes()).hexdigest())
        rows.append({"image": f"{n}.png", "question": f"Row {n}?", "answer": f"red {n}"})
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = json.dumps({"path": "rows.jsonl", "shuffle": False, "eval_fraction": 0})
    words = ["try", "dataset", "--env-args", args, "--model", str(tiny_model), "--tasks", "3"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "tasks: 3, problems: 0" in output
    traces = list(read_traces(RunDir(Path("runs/try-dataset-001")).eval_traces("try")))
    assert [trace.task for trace in traces] == [0, 1, 2]
    shown = output.split("(rows: ")
    for n, (trace, text) in enumerate(zip(traces, shown, strict=False)):
        refs = [slot.item.ref for node in trace.nodes for slot in node.slots]
        assert [ref.digest for ref in refs] == [digests[n]]
        assert f"Row {n}?" in text and f"64x{32 * (n + 1)}" in text
        assert f"rows.jsonl, line {n + 1}: answer = 'red {n}'" in text


def test_new_project_passes_its_test_and_overwrites_no_folder(tmp_path: Path, capsys: Any) -> None:
    assert main(["init", str(tmp_path / "three-shapes")]) == 0
    assert "class ThreeShapesEnv(" in (tmp_path / "three-shapes" / "environment.py").read_text()
    assert "`sightline try environment:ThreeShapesEnv`" in capsys.readouterr().out
    for file in ("rl.toml", "warmup.toml"):
        section = load_config(
            RunFile if file == "rl.toml" else SftFile, tmp_path / "three-shapes" / file
        ).env
        assert section is not None and section.name == "environment:ThreeShapesEnv"
    readme = (tmp_path / "three-shapes" / "README.md").read_text()
    assert readme.partition("```sh\n")[2].startswith("sightline try environment:ThreeShapesEnv")
    assert main(["init", str(tmp_path / "3d")]) == 0
    compile((tmp_path / "3d" / "environment.py").read_text(), "environment.py", "exec")
    assert main(["init", str(tmp_path / "shapes")]) == 0
    files = {"README.md", "environment.py", "rl.toml", "test_environment.py", "warmup.toml"}
    assert {path.name for path in (tmp_path / "shapes").iterdir()} == files
    assert 'name = "shapes"' in (tmp_path / "shapes" / "environment.py").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "shapes", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
    assert main(["init", str(tmp_path / "shapes")]) == 2
    for refused in ("no name", "größe", "x" * 94, "-x"):
        assert main(["init", "--", str(tmp_path / refused)]) == 2
        assert not (tmp_path / refused).exists()
    assert main(["init", str(tmp_path / ("v1.5+" + "x" * 88))]) == 0
    load_config(SftFile, tmp_path / ("v1.5+" + "x" * 88) / "warmup.toml")
    assert "shapes already exists" in capsys.readouterr().err
