"""The command line: errors with their fix, exit statuses, imports."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shards import take_first

from sightline.cli.main import EXTRA_OF_PACKAGE, build_parser, main, print_error
from sightline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_an_error_is_printed_with_its_fix_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", str(tmp_path / "none.toml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no run file at" in captured.err and "  fix: check the path" in captured.err
    assert "Traceback" not in captured.err


def test_text_in_an_error_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ConfigError("the template says \x1b[31m\r\x9b", "line\nline"))
    printed = capsys.readouterr().err
    assert "\\x1b[31m\\r\\x9b" in printed and "line\nline" in printed
    assert not any(sign in printed for sign in "\x1b\r\x9b")


@pytest.mark.parametrize("option", ["--seed", "--seeds"])
def test_option_of_other_tools_is_refused_with_the_setting(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["rl", "run.toml", option, "3"])
    assert "append run.seed=0,1,2 for one run per seed" in capsys.readouterr().err


def test_help_covers_all_commands_without_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "rich")
    script = (
        "import contextlib, sys\nfrom sightline.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    for words in (["--help"], ["try", "--help"], ["eval", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60
        )
        assert "usage: sightline" in done.stdout and done.stdout.endswith("\n[]\n"), done
    assert build_parser([]).format_help() == build_parser().format_help()


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    take_first(
        [
            (["rl", "run.toml"], "torch", "train"),
            (["sft", "run.toml"], "transformers", "train"),
            (["serve", "m", "--media", "d"], "torch", "train"),
            (["model", "tiny", "m"], "torch", "train"),
            (["export", "run", "target"], "torch", "train"),
            (["view", "run"], "fastapi", "view"),
            (["samples", "run"], "pyarrow", "data"),
        ],
        3,
    ),
)
def test_missing_extra_is_named_with_its_install_command(
    tmp_path: Path, words: list[str], package: str, extra: str
) -> None:
    output = '[sft]\noutput_dir = "o"\n' if words[0] == "sft" else ""
    (tmp_path / "run.toml").write_text(f'[model]\npath = "m"\n[env]\nname = "e"\n{output}')
    done = run_without([package], words, tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"the package {package}" in done.stderr and "Traceback" not in done.stderr
    assert f"pip install 'sightline-rl[{extra}]'" in done.stderr


def test_extras_named_in_errors_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRA_OF_PACKAGE.items():
        assert extra in project["optional-dependencies"]
        assert not [words for words in project["dependencies"] if words.startswith(package)]


def test_base_package_has_every_command_and_reads_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n[env]\nname = "e"\n')
    commands = [["config", "show", "run.toml"], ["media", "ls", "--store", "."], ["--help"]]
    done = run_without(list(EXTRA_OF_PACKAGE), commands[0], tmp_path, *commands[1:])
    assert done.returncode == 0 and "usage: sightline" in done.stdout, done.stderr


def run_without(
    packages: list[str], words: list[str], folder: Path, *more: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run the command, and the following ones while they succeed, in an interpreter without these
    packages.
    """
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
        "from sightline.cli.main import main\n"
        f"sys.exit(next((status for words in {[words, *more]!r} if (status := main(words))), 0))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120
    )
