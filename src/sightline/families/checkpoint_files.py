"""The JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; FamilyError where the file is broken."""
    fix = "copy it again from the checkpoint"
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise FamilyError(f"{file} is broken: {error}", fix) from error
    if not isinstance(found, dict):
        raise FamilyError(f"{file} is broken: it holds no JSON object", fix)
    return found


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
