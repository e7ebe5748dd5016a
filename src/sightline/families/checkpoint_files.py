"""Find a checkpoint's folder and read its files.

A model is a folder or a Hugging Face Hub id (`owner/name[@revision]`). An id is looked up in the
local cache first. If it is missing, the small files that a renderer needs are downloaded, and the
weights on demand.
"""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

from sightline.errors import FamilyError
from sightline.regular_file import check_file, read_text
from sightline.render import Tokenizer

CONFIG_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "generation_config.json", "tiktoken.model",
)  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
# A checkpoint has one of the two tokenizer files.
_REQUIRED_FILES = (("config.json",), ("tokenizer.json", "tiktoken.model"))
_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def resolve_checkpoint(model: str | Path, with_weights: bool = False) -> Path:
    """Return the folder of a model. A path that is neither a folder nor an id is not changed."""
    path = Path(model)
    match = _ID.fullmatch(str(model))
    if path.exists() or match is None:
        return path
    import huggingface_hub

    files = [*CONFIG_FILES, *(WEIGHT_FILES if with_weights else ())]
    download = partial(huggingface_hub.snapshot_download, match[1], revision=match[2])
    for is_local in (True, False):
        try:
            folder = Path(download(allow_patterns=files, local_files_only=is_local))
        except (OSError, ValueError) as error:
            problem = first_line(error)
            continue
        needed = [*_REQUIRED_FILES, *([("*.safetensors",)] if with_weights else [])]
        missing = [
            " or ".join(names) for names in needed if not any(any(folder.glob(n)) for n in names)
        ]
        if not missing:
            return folder
        problem = f"{folder} lacks {', '.join(missing)}"
    raise FamilyError(
        f"{str(model)!r} is not a folder, and cannot be downloaded from the hub: {problem}",
        "pass a folder, train this one first with `sightline sft FILE` if it is the output_dir of "
        "a warm-up, create a model with `sightline model tiny DIR`, or put these files into the "
        f"hub's cache: {', '.join(files)}",
    )


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise FamilyError if the file is invalid."""
    fix = "copy it again from the checkpoint"
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise FamilyError(f"{file} is broken: {error}", fix) from error
    if not isinstance(content, dict):
        raise FamilyError(f"{file} is broken: it is not a JSON object", fix)
    return content


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_vocab_size(path: Path, tokenizer: Tokenizer) -> int:
    """Return the number of rows in the model's head. Check that the tokenizer fits it."""
    config = read_json(path / "config.json")
    vocab_size = int((config.get("text_config") or config)["vocab_size"])
    if tokenizer.vocab_size > vocab_size:
        problem = f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}"
        raise FamilyError(problem, "copy the tokenizer files from the same checkpoint")
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
    """Return whether the model reasons first: `"thinking"` in tokenizer_config.json."""
    file = path / "tokenizer_config.json"
    return bool(read_json(file).get("thinking", True)) if file.is_file() else True


def read_shapes(model: Path) -> dict[str, list[int]]:
    """Return every tensor's shape. Raise FamilyError for truncated, missing or quantized files."""
    from safetensors import SafetensorError, safe_open  # not installed in environment workers

    tensors: dict[str, Any] = {}
    fix = "copy it again from the checkpoint"
    index, files = model / "model.safetensors.index.json", sorted(model.glob("*.safetensors"))
    if index.is_file():
        for name in map(str, set(read_json(index).get("weight_map", {}).values())):
            if model / name not in files:
                raise FamilyError(f"{model / name} is missing, but {index.name} names it", fix)
    for path in files:
        try:
            with safe_open(check_file(path), framework="numpy") as file:
                tensors |= {name: file.get_slice(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise FamilyError(f"{path} is not a complete safetensors file: {error}", fix) from error
    kinds = {str(tensor.get_dtype()) for tensor in tensors.values()}
    if quantized := sorted(kind for kind in kinds if kind.startswith(("F8", "F4", "I8"))):
        raise FamilyError(  # a cast would drop the scales of their values
            f"{model} is quantized: it has tensors of type {', '.join(quantized)}",
            "use the checkpoint in bfloat16, which most publishers also offer",
        )
    return {name: tensor.get_shape() for name, tensor in tensors.items()}


def hide_pad_warning() -> None:
    """Hide transformers' warning about the `pad_token_id` in default configs.

    transformers builds a default config whenever it reads or writes one. Sightline never pads
    batches with that id.
    """
    logging.getLogger("transformers.configuration_utils").addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Model config: pad_token_id must be")
