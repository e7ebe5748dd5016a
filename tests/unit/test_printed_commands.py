"""Commands that Sightline prints can be pasted into a shell, whatever the paths contain."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import sightline
from sightline.errors import ResumeRefused
from sightline.launch.claim import lock_run_dir
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.processes import Processes
from sightline.orchestrator.run_state import read_progress
from sightline.run import RunDir
from sightline.view.run_status import get_status

SOURCES = Path(sightline.__file__).parent
COMMAND = re.compile(
    r"(?:^|[`\s])((?:sightline (?:rl|sft|resume|status|export|view|stop|doctor|try|serve|check|\0)|"
    r"kubectl|squeue|scancel|tail|cd|rm) [^`\n]*)"
)
"""A command in a text. `\\0` stands for a value."""
FIXED = {"class_name", "command", "on", "status.command"}
"""Values that come from our own lists of words."""


def list_values(text: ast.JoinedStr) -> list[str]:
    """Return the values in the commands of an f-string."""
    parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in text.values]
    values = [ast.unparse(p.value) for p in text.values if isinstance(p, ast.FormattedValue)]
    whole = "".join(map(str, parts))
    return [
        values[whole.count("\0", 0, place)]
        for command in COMMAND.finditer(whole)
        for place in range(*command.span())
        if whole[place] == "\0"
    ]


def test_no_command_contains_an_unquoted_value() -> None:
    unquoted = [
        f"{path.relative_to(SOURCES)}: {value}"
        for path in sorted(SOURCES.rglob("*.py"))
        for text in ast.walk(ast.parse(path.read_text()))
        if isinstance(text, ast.JoinedStr)
        for value in list_values(text)
        if value not in FIXED
    ]
    assert unquoted == []


def test_commands_with_a_hostile_run_directory_are_quoted(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "my runs;x $(y)" / "r-001")
    run_dir.make()
    run_dir.config.write_text("[orchestrator]\n")
    for printed in (Processes(run_dir).resume_command, get_status(run_dir).resume_command):
        *words, path = shlex.split(printed)
        assert words == ["sightline", "rl", "--resume"]
        assert Path(path).absolute() == run_dir.path
    with lock_run_dir(run_dir), pytest.raises(ResumeRefused) as caught, lock_run_dir(run_dir):
        pass
    command = caught.value.fix.split("`")[1]
    assert shlex.split(command) == ["sightline", "stop", str(run_dir.path)]
    run_dir.progress.write_text("damaged")
    with pytest.raises(ResumeRefused) as caught:
        read_progress(run_dir)
    command = caught.value.fix.split("`")[1]
    assert shlex.split(command) == ["sightline", "export", str(run_dir.path), "DIR"]


def test_words_for_the_remote_shell_of_ssh_are_quoted() -> None:
    words = ["process", "worker-0", "/big disk;x", "--join"]
    over_ssh = ProcessSpec("worker-0", words, 1, python="~/my env/python", host=["ssh", "gpu-1"])
    assert over_ssh.command[2] == "~/'my env/python'", "the remote shell expands ~/"
    remote = " ".join(over_ssh.command[3:])
    assert shlex.split(remote) == ["-m", "sightline", *words]
    plain = ProcessSpec("worker-0", words, 1, host=["ip", "netns", "exec", "b"])
    assert plain.command[-len(words) :] == words, "without a shell, nothing is quoted"
