"""The `sightline` command: find the subcommand, run it, and print errors with their fix."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import sightline.cli
import sightline.view.commands
from sightline.errors import ConfigError, SightlineError, mask_output
from sightline.regular_file import read_text

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""Pattern for the start of an override: `section.key=`."""

HINTS = dict.fromkeys(("--seed", "--seeds"), "; append run.seed=0,1,2 for one run per seed")
"""Hints for options that users of other tools expect."""

NOT_COMMANDS = ("main", "training")
"""Modules of this folder that are not commands."""

EXTRA_OF_PACKAGE = {
    "torch": "train",
    "transformers": "train",
    "huggingface_hub": "train",
    "safetensors": "train",
    "jaxtyping": "train",
    "fastapi": "view",
    "pyarrow": "data",
    "peft": "lora",
    "gguf": "gguf",
    "ray": "ray",
    "obstore": "object-store",
}
"""Extra that installs each package that the base installation lacks."""


class Parser(argparse.ArgumentParser):
    """A parser with `--debug` at every level and without abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        mask_output()
        if os.getcwd() not in sys.path:
            # Like `python -m`, because users keep their environments next to the run file.
            sys.path.insert(0, os.getcwd())
    try:
        args = parse(arguments)
        return int(args.run(args) or 0)
    except (SightlineError, ModuleNotFoundError) as error:
        reported = error if isinstance(error, SightlineError) else None
        for cause in (error, error.__cause__):
            if isinstance(cause, ModuleNotFoundError):
                reported = find_missing_extra(cause) or reported
        if reported is None or "--debug" in arguments:
            raise
        print_error(reported)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Python would raise again on the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Overrides may come before or after options."""
    parser = build_parser(arguments)
    args, rest = parser.parse_known_args(arguments)
    if any(not OVERRIDE.match(word) for word in rest) or (rest and not hasattr(args, "overrides")):
        hint = next((HINTS[word] for word in rest if word in HINTS), "")
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def build_parser(arguments: Sequence[str] | None = None) -> Parser:
    """Build the parser for all commands.

    With `arguments`, only the command that they start with is imported. The list of commands needs
    only docstrings.
    """
    from sightline import __version__

    parser = Parser(
        prog="sightline", description="Train vision-language models with reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"sightline {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    names = list_commands()
    command = next((word for word in arguments or () if not word.startswith("-")), None)
    if arguments is None or command in names:
        for name in [command] if command in names else names:
            add_command(name, importlib.import_module(names[name]), subparsers)
        return parser
    for name, module in names.items():
        spec = importlib.util.find_spec(module)
        source = read_text(Path(spec.origin)) if spec and spec.origin else ""
        subparsers.add_parser(name, help=_find_summary(ast.get_docstring(ast.parse(source))))
    return parser


def list_commands() -> dict[str, str]:
    """Return the module of each command, by name."""
    modules = {
        module.name: f"{package.__name__}.{module.name}"
        for package in (sightline.cli, sightline.view.commands)
        for module in pkgutil.iter_modules(package.__path__)
    }
    return {name: modules[name] for name in sorted(modules) if name not in NOT_COMMANDS}


def add_command(name: str, module: ModuleType, subparsers: Any) -> None:
    """Add the command of `module`, described by its docstring."""
    description = (module.__doc__ or "").partition("\n\n")[2]
    summary = _find_summary(module.__doc__)
    parser = subparsers.add_parser(name, help=summary, description=description)
    module.add_arguments(parser)
    if hasattr(module, "run"):
        parser.set_defaults(run=module.run)


def _find_summary(docstring: str | None) -> str:
    """Return the summary in the first line of a command's docstring."""
    return (docstring or "").partition("\n\n")[0].partition(": ")[2].rstrip(".")


def add_env_args(parser: argparse.ArgumentParser) -> None:
    """Add the option `--env-args`."""
    parser.add_argument(
        "--env-args",
        type=_parse_env_args,
        default={},
        metavar="JSON",
        help="arguments of ENV as a JSON object",
    )


def _parse_env_args(word: str) -> dict[str, Any]:
    values = json.loads(word)
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f'{word} is not a JSON object such as {{"key": 1}}')
    return values


def find_missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """Return an error that names the extra with the missing package, or None."""
    package = (error.name or "").partition(".")[0]
    if (extra := EXTRA_OF_PACKAGE.get(package)) is None:
        return None
    return ConfigError(
        f"this command requires the package {package}, which is not installed",
        f"run `{sys.executable} -m pip install 'sightline-rl[{extra}]'`",
    )


def print_error(error: SightlineError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    # Quoted text, such as that of a template, must not control the terminal.
    problem, fix = (_CONTROL.sub(lambda c: repr(c[0])[1:-1], t) for t in (error.problem, error.fix))
    console.print(Text(problem, style="bold red"))
    console.print(Text(f"  fix: {fix}", style="red"))
