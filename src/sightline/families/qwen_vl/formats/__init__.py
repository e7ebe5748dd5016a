"""Chat formats, and which of them a checkpoint speaks.

The model type of config.json says which formats can be meant; the checkpoint's own chat template
decides. A template counts as known when our tokens equal its own on a set of probe conversations.
A folder without a template speaks the first format of its model type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.errors import FamilyError
from sightline.families.protocol import Family
from sightline.families.qwen_vl.formats.base import ChatFormat, ImageCounter, RenderContext
from sightline.families.qwen_vl.formats.known import (
    Qwen3,
    Qwen3VL,
    Qwen3VLThinking,
    Qwen25VL,
    Qwen35,
)
from sightline.families.qwen_vl.formats.template_check import find_template_difference
from sightline.render import ChatTemplate, Tokenizer

FORMATS: dict[str, tuple[type[ChatFormat], ...]] = {
    "qwen2_5_vl": (Qwen25VL,),
    "qwen3_vl": (Qwen3VL, Qwen3VLThinking),
    "qwen3_vl_moe": (Qwen3VL, Qwen3VLThinking),
    "qwen3_5": (Qwen35,),
    "qwen3": (Qwen3,),
}
"""By model type; the first is that of a folder without a template."""

__all__ = ["FORMATS", "ChatFormat", "ImageCounter", "RenderContext", "select_chat_format"]


def select_chat_format(
    path: Path, config: dict[str, Any], tokenizer: Tokenizer, family: Family
) -> ChatFormat:
    """The format of a checkpoint folder; FamilyError with the first difference for none."""
    candidates = FORMATS[config["model_type"]]
    template = ChatTemplate.find(path)
    if template is None:
        return candidates[0](tokenizer, family)
    differences = []
    for candidate in candidates:
        chat_format = candidate(tokenizer, family)
        difference = find_template_difference(chat_format, template, tokenizer, family)
        if difference is None:
            return chat_format
        differences.append(f"{candidate.name}: {difference}")
    raise FamilyError(
        f"{path}: the chat template is none that is known. " + " ".join(differences),
        "use the chat template that the checkpoint was published with",
    )
