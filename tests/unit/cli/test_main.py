"""The command line: errors with their cure, exit statuses, what is imported."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sightline import __version__
from sightline.cli.main import Parser, add_command, build_parser, list_commands, main
from sightline.errors import ConfigError


def test_an_error_is_printed_with_its_fix_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", str(tmp_path / "none.toml")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no run file at" in shown.err and "  fix: check the path" in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(tmp_path: Path, before: bool) -> None:
    words = ["config", "show", str(tmp_path / "none.toml")]
    with pytest.raises(ConfigError):
        main(["--debug", *words] if before else [*words, "--debug"])


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "'config'" in capsys.readouterr().err


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"sightline {__version__}"


def test_only_the_command_that_is_called_is_declared() -> None:
    declared = build_parser(["config", "schema"]).format_help()
    assert "config" in declared and "make checkpoints" not in declared


def test_benchmarks_are_commands_of_bench_only() -> None:
    assert not [name for name in list_commands() if name.startswith("bench_")]
    assert "main" not in list_commands()


def test_a_command_runs_its_own_file_s_run_unless_an_action_names_another() -> None:
    def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
        actions = subparsers.add_parser("thing").add_subparsers()
        actions.add_parser("one")
        actions.add_parser("two").set_defaults(run=lambda args: 2)

    parser = Parser()
    add_command(SimpleNamespace(add=add, run=lambda args: 1), parser.add_subparsers())  # type: ignore[arg-type]
    for words, status in ((["thing", "one"], 1), (["thing", "two"], 2)):
        args = parser.parse_args(words)
        assert args.run(args) == status


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sightline", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"sightline {__version__}")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"set -o pipefail; {sys.executable} -m sightline config schema | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "# Settings\n"
    assert done.stderr == ""
