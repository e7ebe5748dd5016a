"""An environment whose package is installed only for the workers' interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import sightline
from sightline.config import EnvConfig
from sightline.errors import ConfigError
from sightline.launch.checks.model import describe_environment

CODEWORD = EnvConfig(name="color_codeword")


def write_python(path: Path, script: str) -> str:
    """An interpreter that is a few lines of shell."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_another_interpreter_describes_the_environment_identically() -> None:
    assert describe_environment(CODEWORD, sys.executable) == describe_environment(CODEWORD, "")


def test_output_of_user_code_does_not_corrupt_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud.py").write_text(
        "from sightline import Environment\n"
        'print(\'{"name": "loud"\')\n'
        "class Loud(Environment):\n"
        "    name = 'loud'\n"
        "    shows_media = False\n"
        "    def task(self, index, split): ...\n"
        "    async def rollout(self, task, chat): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{Path(sightline.__file__).parents[1]}:{tmp_path}")
    environment = describe_environment(EnvConfig(name="loud:Loud"), sys.executable)
    assert (environment.name, environment.shows_media) == ("loud", False)


def test_environment_missing_in_the_interpreter_is_refused_naming_it() -> None:
    with pytest.raises(ConfigError, match=r"\[rollout\] python = .*nowhere"):
        describe_environment(EnvConfig(name="nowhere:Env"), sys.executable)


def test_worker_interpreter_without_sightline_is_refused(tmp_path: Path) -> None:
    python = write_python(tmp_path / "python", "echo 'No module named sightline' >&2; exit 1")
    with pytest.raises(
        ConfigError, match="cannot run sightline.envs.environment_info: No module named"
    ):
        describe_environment(CODEWORD, python)


def test_interpreter_that_prints_no_description_is_refused(tmp_path: Path) -> None:
    for script in ("exit 0", "echo hello"):
        with pytest.raises(ConfigError, match="cannot run sightline.envs.environment_info"):
            describe_environment(CODEWORD, write_python(tmp_path / "python", script))


def test_different_sightline_version_is_refused_naming_both() -> None:
    with pytest.raises(ConfigError, match=r"has sightline 0\.[\d.]+, and this is 9\.9\.9"):
        describe_environment(CODEWORD, sys.executable, version="9.9.9")
