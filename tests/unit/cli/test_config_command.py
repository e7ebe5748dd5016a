"""`sightline config`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sightline import config
from sightline.cli.main import main

RL = '[model]\npath = "m"\n[env]\nname = "e"\n'


def test_show_prints_the_file_with_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RL)
    assert main(["config", "show", str(path), "run.seed=7"]) == 0
    output = tomllib.loads(capsys.readouterr().out)
    assert output["run"]["seed"] == 7
    assert config.validate_config(config.RunFile, output, "shown") == config.load_config(
        config.RunFile, path, ["run.seed=7"]
    )


def test_unrecognized_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["config", "schema", "run.seed=7"], ["config", "schema", "more"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def test_schema_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    page = capsys.readouterr().out
    for kind in (config.RunFile, config.SftFile):
        for section, name, _ in config.iter_settings(kind):
            body = page.split(f"## [{section}]")[1].split("\n## ")[0]
            assert f"| `{name}` |" in body


def test_json_schema_describes_both_file_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"RunFile", "SftFile", "TrainerConfig"} <= set(schema["$defs"])


BEFORE_TORCH = """
import sys
from sightline.cli.main import main
for command in (["rl"], ["check"], ["sft"]):
    assert main([*command, sys.argv[1], "run.sed=1"]) == 2, command
    assert main([*command, "no.toml"]) == 2, command
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_commands_refuse_a_wrong_setting_before_they_load_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "tiny"\n[env]\nname = "vowels"\n')
    words = [sys.executable, "-c", BEFORE_TORCH, str(tmp_path / "run.toml")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did you mean 'seed'?") == 3
    assert done.stderr.count("no run file at no.toml") == 3
