"""The `sightline` command: finds the commands, runs one, and prints errors with their cure."""

from __future__ import annotations

import argparse
import ast
import importlib.util
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

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

OVERRIDE = re.compile(r"\w+(\.\w+)+=")
"""How the override of a setting begins: `section.key=`."""


NOT_COMMANDS = ("main", "training")
"""Modules of this folder that are no commands."""

EXTRA_OF_PACKAGE = {
    "torch": "train",
    "transformers": "train",
    "huggingface_hub": "train",
    "safetensors": "train",
    "jaxtyping": "train",
    "fastapi": "view",
    "pyarrow": "data",
    "peft": "lora",
    "ray": "ray",
    "obstore": "object-store",
    "yaml": "train",
}
"""The extra that brings a package which the light base does not."""


RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "serve": {
        "--max-len": "--max-model-len",
        "--max-rows": "--max-num-seqs",
        "--prefill-chunk": "--prefill-chunk-tokens",
        "--no-kv-reuse": "--no-enable-prefix-caching",
    },
    "eval": {
        "--max-len": "--max-model-len",
        "--at-once": "--max-concurrent",
        "--args": "--env-args",
    },
    "inspect": {"--shows-images": "--require-images"},
    "samples": {"--max-mb": "--max-image-mb"},
    "trace": {"--out": "--output"},
}
"""For each command its old options, and what they are called now."""


class Parser(argparse.ArgumentParser):
    """A parser that takes `--debug` at every level, and no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        mask_output()
        if os.getcwd() not in sys.path:
            # As `python -m` does, and so every process that this one starts: an environment of
            # one's own lies beside its run file.
            sys.path.insert(0, os.getcwd())
    try:
        check_option_names(words)
        args = parse(words)
        return int(args.run(args) or 0)
    except (SightlineError, ModuleNotFoundError) as error:
        shown = error if isinstance(error, SightlineError) else None
        for cause in (error, error.__cause__):
            if isinstance(cause, ModuleNotFoundError):
                shown = find_missing_extra(cause) or shown
        if shown is None or "--debug" in words:
            raise
        print_error(shown)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def check_option_names(words: Sequence[str]) -> None:
    """Refuses an option under its old name, with the new one."""
    command = next((word for word in words if not word.startswith("-")), "")
    for word in words:
        option = word.partition("=")[0]
        if new := RENAMED_OPTIONS.get(command, {}).get(option):
            raise ConfigError(f"{option} is now called {new}", f"write {new}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; overrides of settings may stand on either side of an option."""
    parser = build_parser(words)
    args, rest = parser.parse_known_args(words)
    if any(not OVERRIDE.match(word) for word in rest) or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def build_parser(words: Sequence[str] | None = None) -> Parser:
    """The parser of every command. Where `words` are given, only the command that they begin with
    is imported; the list of all commands needs their docstrings alone."""
    from sightline import __version__

    parser = Parser(prog="sightline", description="Trains vision-language models with RL.")
    parser.add_argument("--version", action="version", version=f"sightline {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    names = list_commands()
    wanted = next((word for word in words or () if not word.startswith("-")), None)
    if words is None or wanted in names:
        for name in [wanted] if wanted in names else names:
            add_command(name, importlib.import_module(names[name]), subparsers)
        return parser
    for name, module in names.items():
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text() if spec and spec.origin else ""
        subparsers.add_parser(name, help=_find_summary(ast.get_docstring(ast.parse(source))))
    return parser


def list_commands() -> dict[str, str]:
    """The commands by their names, each with its module."""
    found = {
        module.name: f"{package.__name__}.{module.name}"
        for package in (sightline.cli, sightline.view.commands)
        for module in pkgutil.iter_modules(package.__path__)
    }
    return {name: found[name] for name in sorted(found) if name not in NOT_COMMANDS}


def add_command(name: str, module: ModuleType, subparsers: Any) -> None:
    """Adds the command of `module`, which its docstring explains; its `run` serves, if it has one,
    where no action names its own."""
    description = (module.__doc__ or "").partition("\n\n")[2]
    summary = _find_summary(module.__doc__)
    parser = subparsers.add_parser(name, help=summary, description=description)
    module.add_arguments(parser)
    if hasattr(module, "run"):
        parser.set_defaults(run=module.run)


def _find_summary(docstring: str | None) -> str:
    """What a command does, in the title of its docstring."""
    return (docstring or "").partition("\n\n")[0].partition(": ")[2].rstrip(".")


def find_missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """What to install, where an extra brings the package that was not found."""
    package = (error.name or "").partition(".")[0]
    if (extra := EXTRA_OF_PACKAGE.get(package)) is None:
        return None
    return ConfigError(
        f"this needs the package {package}, which is not installed",
        f"pip install 'sightline-rl[{extra}]' for {sys.executable}",
    )


def print_error(error: SightlineError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(error.problem, style="bold red"))
    console.print(Text(f"  fix: {error.fix}", style="red"))
