"""Rewards for tables, code and JSON, in a fence (```) or as the whole answer."""

from __future__ import annotations

import ast
import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from typing import Any

from sightline.envs.protocol import import_extra
from sightline.envs.rewards.text import normalize

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_RULE = re.compile(r"[\s|:+-]+")
_ROW, _CELL = (
    re.compile(rf"<{tag}\b[^>]*>(.*?)(?=</{tag}|<{tag}\b|\Z)", re.DOTALL | re.IGNORECASE)
    for tag in ("tr", "t[dh]")
)
_MAX_CODE_CHARS = 1 << 16
_MAX_JSON_STARTS = 100


def find_block(text: str) -> str:
    """Return the last fenced block of a text, or the whole text."""
    blocks = _FENCE.findall(text)
    return str(blocks[-1] if blocks else text).strip()


def table(answer: str, expected: Any) -> float:
    """Return the F1 score of the cells, each at its place, up to case and spaces.

    Tables are Markdown, HTML or CSV. A reference may also be a list of rows.
    """
    if isinstance(expected, list) and all(isinstance(row, list) for row in expected):
        reference = [["" if cell is None else normalize(cell) for cell in row] for row in expected]
    else:
        reference = _read_table(expected) if isinstance(expected, str) else []
    if not reference:
        raise ValueError("the reference is not a table")
    return _get_overlap(_read_table(find_block(answer)), reference)


def _read_table(text: str) -> list[list[str]]:
    if "<tr" in text.lower():
        rows = map(_CELL.findall, _ROW.findall(text))
        return [[unescape(re.sub(r"<[^>]*>", " ", cell)) for cell in row] for row in rows]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("|" in line for line in lines):
        lines = [line for line in lines if "|" in line and not _RULE.fullmatch(line)]
        return [line.removeprefix("|").removesuffix("|").split("|") for line in lines]
    try:
        return list(csv.reader(lines, skipinitialspace=True))
    except csv.Error:  # a cell that is too long
        return []


def code(answer: str, expected: Any, language: str = "python") -> float:
    """Return 1 if the code equals the reference, up to layout. No code is run.

    Python is compared by its syntax tree, other languages by their tokens.
    """
    reference_code = _read_code(find_block(str(expected)), language)
    if not reference_code:
        raise ValueError(f"the reference {str(expected)[:80]!r} is not {language}")
    return float(_read_code(find_block(answer), language) == reference_code)


def _read_code(text: str, language: str) -> Any:
    if language != "python":
        return re.findall(r"\w+|[^\w\s]", text)
    try:
        return ast.dump(ast.parse(text)) if len(text) <= _MAX_CODE_CHARS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def json_overlap(answer: str, expected: Any) -> float:
    """Return the F1 score of the values in the answer's JSON, each at its path."""
    reference = _find_json(expected) if isinstance(expected, str) else expected
    if reference is None:
        raise ValueError(f"the reference {expected!r} is not JSON")
    value = _find_json(answer)
    return 0.0 if value is None else _get_overlap(value, reference)


def json_schema(answer: str, expected: Any, schema: Any = None) -> float:
    """Return 1 if the answer's JSON is valid by `schema`, or else by the reference."""
    library = import_extra("jsonschema", "rewards")
    references = import_extra("referencing", "rewards")
    registry = references.Registry()  # fetches nothing
    rules = expected if schema is None else schema
    rules = json.loads(rules) if isinstance(rules, str) else rules
    if not isinstance(rules, dict | bool):
        raise ValueError(f"{rules!r} is not a JSON schema")
    kind = library.validators.validator_for(rules, default=library.Draft202012Validator)
    try:
        kind.check_schema(rules)
        value = _find_json(answer)
        return float(value is not None and kind(rules, registry=registry).is_valid(value))
    except library.SchemaError as error:
        raise ValueError(f"the schema is not valid: {error.message}") from error
    except references.exceptions.Unresolvable as error:
        raise ValueError(f"the schema is not valid: {error}") from error
    except RecursionError:  # the answer is nested too deeply
        return 0.0


def _find_json(text: str) -> Any:
    """Return the JSON of a fenced block, or the first object or array in it, or None.

    `NaN` and `Infinity` are not JSON.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    block, decoder = find_block(text), json.JSONDecoder(parse_constant=refuse)
    starts = [match.start() for match in re.finditer(r"[{\[]", block)]
    for start in (0, *starts[:_MAX_JSON_STARTS]):
        try:
            return decoder.raw_decode(block, start)[0]
        except (ValueError, RecursionError):
            continue
    return None


def _get_overlap(value: Any, reference: Any) -> float:
    """Return the F1 score of the leaves of two trees."""
    given, expected = (Counter(_list_leaves(tree)) for tree in (value, reference))
    return 2 * (given & expected).total() / (given.total() + expected.total())


def _list_leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    is_tree = isinstance(value, dict | list)
    if not is_tree or not value:
        leaf = normalize(value) if isinstance(value, str | float) else str(value)
        yield (path, isinstance(value, str), leaf)
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _list_leaves(inner, (*path, key))
