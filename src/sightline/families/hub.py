"""Resolve a model name: a folder, or an id of the Hugging Face hub (`owner/name[@revision]`).

An id is looked up in the local cache first. Otherwise the small files that a renderer needs are
downloaded, and the weights on demand.
"""

from __future__ import annotations

import re
from pathlib import Path

from sightline.errors import FamilyError

CONFIG_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "generation_config.json", "tiktoken.model",
)  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
# Tokenizers come in one form or the other.
_REQUIRED_FILES = (("config.json",), ("tokenizer.json", "tiktoken.model"))
_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def resolve_checkpoint(model: str | Path, with_weights: bool = False) -> Path:
    """Return the folder of a model. A path that is neither folder nor id is returned as it is."""
    path = Path(model)
    match = _ID.fullmatch(str(model))
    if path.exists() or match is None:
        return path
    import huggingface_hub

    files = [*CONFIG_FILES, *(WEIGHT_FILES if with_weights else ())]
    for is_local in (True, False):
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    match[1], revision=match[2], allow_patterns=files, local_files_only=is_local
                )
            )
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
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
        "create a model with `sightline model tiny DIR`, name a folder, or put these files into "
        f"the hub's cache: {', '.join(files)}",
    )
