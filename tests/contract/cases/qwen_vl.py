"""Qwen-VL: every type of checkpoint and every chat format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shards import IS_FULL

from tests.contract.case import EXTRA_MERGES, Case

SHARED = Path(__file__).parents[3].parent / "shared"


def _tiny(kind: str, merges: bool) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        from sightline.families.registry import write_tiny

        write_tiny("qwen_vl", path, type=kind, extra_merges=EXTRA_MERGES if merges else ())

    return write


def _load_qwen_images(path: Path) -> Any:
    # Use the class by name: AutoImageProcessor requires torchvision in some supported versions.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)


def _write_video(family: Any, inputs: dict[str, Any]) -> str:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    kind = Qwen2_5_VLProcessor if family.joins_steps else Qwen3VLProcessor
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=family.merge, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(None, *given),
    )
    return str(kind.replace_video_token(processor, inputs, 0))


def _qwen(name: str, kind: str, template: str, merges: bool = True, **traits: Any) -> Case:
    published = SHARED / "references" / f"{template}_chat_template.jinja" if template else None
    return Case(
        name,
        _tiny(kind, merges),
        _load_qwen_images,
        "<|image_pad|>",
        published,
        make_arrays=lambda checkpoint, image: checkpoint.transformers_images(image),
        # For Qwen3-VL, the marks go with the pad, as in the processor that was published with it.
        video_mark="<|video_pad|>"
        if kind == "qwen2_5_vl"
        else "<|vision_start|><|video_pad|><|vision_end|>",
        write_video=_write_video,
        **{"has_weights": not merges, "shows_videos": kind != "qwen3", **traits},
    )


def _strip_newlines(text: str) -> str:
    return text.strip("\n")


def _lead(text: str) -> str:
    return text.lstrip("\n")


_THINKS = {"takes_reasoning": True, "carried": _lead, "thought": _strip_newlines}
_TAGGED = {
    "takes_reasoning": True,
    "wants_query": True,
    "carried": str.strip,
    "thought": str.strip,
    "types_arguments": False,
}

_SEES = {"takes_tools": False, "shows_system_images": True}

CASES = (
    _qwen("qwen3_vl", "qwen3_vl", "qwen3_vl", merges=False, has_own_format=IS_FULL),
    _qwen("qwen3_vl_merges", "qwen3_vl", "qwen3_vl"),
    _qwen("qwen3_vl_moe", "qwen3_vl_moe", "qwen3_vl", merges=False, has_own_format=False),
    _qwen("qwen3_vl_thinking", "qwen3_vl_thinking", "", **_THINKS),
    _qwen("qwen2_5_vl", "qwen2_5_vl", "qwen2_5_vl", **_SEES),
    _qwen("qwen2_5_vl_plain", "qwen2_5_vl", "", merges=False, has_own_format=False, **_SEES),
    _qwen("qwen3_5", "qwen3_5", "qwen3_5", **_TAGGED),
    _qwen("qwen3_5_moe", "qwen3_5_moe", "qwen3_5", merges=False, has_own_format=False, **_TAGGED),
    _qwen("qwen3_5_nonthinking", "qwen3_5_nonthinking", "", closes_reasoning=True, **_TAGGED),
    _qwen("qwen3", "qwen3", "qwen3", merges=False, shows_media=False, **_THINKS),
)
