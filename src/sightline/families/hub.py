"""A model is a folder, or an id of the hub: `owner/name`, or `owner/name@revision`.

An id is looked for in the local cache first; then the few small files that a renderer needs are
fetched, and the weights where they are wanted. What comes back is the folder of one commit, so a
run file that names it names the revision.
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
    """The folder of a model; a path that is neither folder nor id comes back as it is."""
    path = Path(model)
    known = _ID.fullmatch(str(model))
    if path.exists() or known is None:
        return path
    import huggingface_hub

    files = [*CONFIG_FILES, *(WEIGHT_FILES if with_weights else ())]
    for is_local in (True, False):
        try:
            found = Path(
                huggingface_hub.snapshot_download(
                    known[1], revision=known[2], allow_patterns=files, local_files_only=is_local
                )
            )
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        needed = [*_REQUIRED_FILES, *([("*.safetensors",)] if with_weights else [])]
        missing = [
            " or ".join(names) for names in needed if not any(any(found.glob(n)) for n in names)
        ]
        if not missing:
            return found
        problem = f"{found} lacks {', '.join(missing)}"
    raise FamilyError(
        f"{str(model)!r} is no folder, and as a model of the hub it cannot be fetched: {problem}",
        "make one with `sightline model tiny DIR`, name a folder, or put the files of the model "
        f"into the cache: {', '.join(files)}",
    )
