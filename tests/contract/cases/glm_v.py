"""GLM-4.6V: with and without reasoning, with and without experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shards import IS_FULL

from tests.contract.case import EXTRA_MERGES, Case

PUBLISHED = Path(__file__).parents[3].parent / "shared/references/glm4_6v_chat_template.jinja"


def _write(path: Path) -> None:
    from sightline.families.registry import write_tiny

    write_tiny("glm_v", path)


def _write_experts(path: Path) -> None:
    from sightline.families.registry import write_tiny

    write_tiny("glm_v", path, type="glm4v_moe")


def _write_with_merges(path: Path) -> None:
    """Return completions that begin with reasoning."""
    from sightline.families.registry import write_tiny

    write_tiny("glm_v", path, thinking=True, extra_merges=EXTRA_MERGES)


def _load_items(path: Path) -> Any:
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    return Glm46VImageProcessorPil.from_pretrained(path, local_files_only=True)


def write_video(family: Any, inputs: dict[str, Any]) -> str:
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

    kind = Glm46VProcessor if family.video.is_dynamic else Glm4vProcessor
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=family.merge), image_token="<|image|>"
    )
    processor.replace_frame_token_id = lambda *given, **named: kind.replace_frame_token_id(
        processor, *given, **named
    )
    return str(kind.replace_video_token(processor, inputs, 0))


def _as_given(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Images under the template's name, and tool results as a list, after which the template writes
    no newline.
    """

    def part(given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image"} if given["type"] == "image_url" else given

    talk = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and message["role"] == "tool":
            content = [{"type": "text", "text": content}]
        is_text = isinstance(content, str)
        talk.append({**message, "content": content if is_text else [*map(part, content)]})
    return talk


def _without_thinking(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"enable_thinking": False}


def _glm(name: str, write: Any, **traits: Any) -> Case:
    return Case(
        name,
        write,
        _load_items,
        "<|image|>",
        PUBLISHED,
        make_arrays=lambda checkpoint, image: checkpoint.transformers_images(image),
        shows_videos=True,
        mixes_media=False,
        video_mark="<|video|>",
        write_video=write_video,
        video_setting='{"size": {"shortest_edge": 1568, "longest_edge": 65536}}',
        shows_system_images=True,
        takes_reasoning=True,
        openers=(("user", "<|user|>"), ("tool", "<|observation|>"), ("assistant", "<|assistant|>")),
        carried=str.strip,
        thought=str.strip,
        types_arguments=False,
        as_given=_as_given,
        **traits,
    )


_SILENT = {"closes_reasoning": True, "template_settings": _without_thinking}

CASES = (
    _glm("glm46v", _write, has_own_format=IS_FULL, **_SILENT),
    _glm("glm46v_merges", _write_with_merges, has_weights=False),
    _glm("glm4v_moe", _write_experts, has_own_format=False, **_SILENT),
)
