"""Writes docs/commands.md from the parsers of the commands, and the names of docs/api.md from the
docstrings: `make docs` runs it."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import sightline
from sightline.cli.main import build_parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
API_PAGE = PAGE.with_name("api.md")
HEAD = """# Commands

Made by `make docs` from the parsers. `sightline COMMAND --help` prints the same in a terminal, and
`--debug`, which every command takes, shows the traceback of an error. Settings are overridden as
`section.key=value` behind a run file: [settings](settings.md).
"""
HIDDEN = {"process"}
"""Commands that the launcher calls and users do not."""


def describe() -> str:
    parser = build_parser()
    summaries = {
        action.dest: action.help or ""
        for group in find_subparsers(parser)
        for action in group._choices_actions
    }
    commands = {
        name: subparser
        for group in find_subparsers(parser)
        for name, subparser in group.choices.items()
        if name not in HIDDEN
    }
    rows = [f"| [`{name}`](#sightline-{name}) | {summaries[name]} |" for name in commands]
    text = [HEAD, "\n".join(["| command | does |", "|---|---|", *rows]) + "\n"]
    for name, command in commands.items():
        text.extend(describe_command(f"sightline {name}", command, summaries[name], 2))
    return "\n".join(text)


def describe_command(
    name: str, parser: argparse.ArgumentParser, summary: str, level: int
) -> Iterator[str]:
    yield f"{'#' * level} {name}\n"
    if words := flow(parser.description or "") or flow(summary):
        yield escape(words[0].upper() + words[1:].rstrip(".")) + ".\n"
    rows = [row for row in map(describe_argument, parser._actions) if row]
    if rows:
        yield "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows]) + "\n"
    for group in find_subparsers(parser):
        helps = {action.dest: action.help or "" for action in group._choices_actions}
        if name == "sightline bench":  # whose parsers import torch before they know their options
            yield "| benchmark | measures |\n|---|---|"
            yield (
                "\n".join(f"| `{action}` | {help_text} |" for action, help_text in helps.items())
                + "\n"
            )
            yield "Their options: `sightline bench NAME --help`; smallest and documented sizes: "
            yield "[benchmarks](benchmarks.md).\n"
            continue
        for action, child in group.choices.items():
            yield from describe_command(f"{name} {action}", child, helps.get(action, ""), level + 1)


def describe_argument(action: argparse.Action) -> str:
    """Return a row of the table, or an empty string for options that every command has."""
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    if hidden or "--debug" in action.option_strings or action.help == argparse.SUPPRESS:
        return ""
    value = "" if action.nargs == 0 else format_value(action)
    name = ", ".join(action.option_strings) or value
    if action.option_strings and value:
        name += f" {value}"
    default = "" if action.nargs == 0 or action.default in (None, [], ()) else action.default
    default = " ".join(map(str, default)) if isinstance(default, list) else str(default)
    default = "" if default == argparse.SUPPRESS else default
    help_text = flow(re.sub(r"[;,]? ?\(?default:? ?%\(default\)s\)?", "", action.help or ""))
    help_text = (
        help_text % {"default": default, "prog": "sightline"} if "%" in help_text else help_text
    )
    default = f"`{default}`" if default else ""
    return f"| `{name.replace('|', chr(92) + '|')}` | {default} | {escape(help_text)} |"


def format_value(action: argparse.Action) -> str:
    choices = " or ".join(map(str, action.choices)) if action.choices else ""
    name = action.metavar or choices or action.dest.upper()
    name = name if isinstance(name, str) else " ".join(name)
    return f"{name}..." if action.nargs in ("*", "+") else name


def find_subparsers(parser: argparse.ArgumentParser) -> list[argparse._SubParsersAction]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def describe_names(page: str) -> str:
    """The page of the Python API with a row for each public name: the head of its docstring."""
    rows = []
    for name in sightline.__all__:
        head = flow((inspect.getdoc(getattr(sightline, name)) or "").partition("\n\n")[0])
        rows.append(f"| `{name}` | {escape(head)} |")
    table = "\n".join(["| name | description |", "|---|---|", *rows])
    head, _, rest = page.partition("\n\n## sightline\n")
    return f"{head.partition('| name |')[0].rstrip()}\n\n{table}\n\n## sightline\n{rest}"


def flow(text: str) -> str:
    return " ".join(text.split())


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(describe())
    API_PAGE.write_text(describe_names(API_PAGE.read_text()))
    print(PAGE, API_PAGE, file=sys.stderr)
