"""Read the files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError
from sightline.render import Tokenizer


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; FamilyError if the file is broken."""
    fix = "copy it again from the checkpoint"
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise FamilyError(f"{file} is broken: {error}", fix) from error
    if not isinstance(content, dict):
        raise FamilyError(f"{file} is broken: it is not a JSON object", fix)
    return content


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_vocab_size(path: Path, tokenizer: Tokenizer) -> int:
    """Return the number of rows of the model's head, after checking the tokenizer against it."""
    config = read_json(path / "config.json")
    vocab_size = int((config.get("text_config") or config)["vocab_size"])
    if tokenizer.vocab_size > vocab_size:
        raise FamilyError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            "copy the tokenizer files from the same checkpoint",
        )
    file = path / "tokenizer_config.json"
    added = read_json(file).get("added_tokens_decoder") if file.is_file() else None
    for token_id, token in (added or {}).items():
        actual = tokenizer.find_token_id(token["content"])
        if actual not in (None, int(token_id)):
            raise FamilyError(
                f"{file} says that {token['content']!r} is token {token_id}, but in tokenizer.json "
                f"it is {actual}",
                "copy both files from the same checkpoint",
            )
    return vocab_size


def read_thinking(path: Path) -> bool:
    """Return `"thinking"` of tokenizer_config.json: whether the model reasons before it answers."""
    file = path / "tokenizer_config.json"
    return bool(read_json(file).get("thinking", True)) if file.is_file() else True


def read_shapes(model: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor; FamilyError for files that are truncated or missing."""
    from safetensors import SafetensorError, safe_open  # not installed in environment workers

    shapes: dict[str, list[int]] = {}
    fix = "copy it again from the checkpoint"
    index, files = model / "model.safetensors.index.json", sorted(model.glob("*.safetensors"))
    if index.is_file():
        for name in set(read_json(index).get("weight_map", {}).values()):
            if model / name not in files:
                raise FamilyError(f"{model / name} is missing, but {index.name} names it", fix)
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise FamilyError(f"{path} is not a complete safetensors file: {error}", fix) from error
    return shapes
