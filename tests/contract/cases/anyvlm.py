"""The generic family, on checkpoints composed of transformers' classes: each a way in which an
image becomes tokens. The witness is the checkpoint's own processor, called as users call it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from shards import IS_FULL, take_first

from tests.contract.case import Case, Checkpoint


def write_kind(kind: str, path: Path) -> None:
    """Write the tiny checkpoint of one kind."""
    from sightline.families.registry import write_tiny

    write_tiny("anyvlm", path, type=kind)


class Images:
    """Counts in what the checkpoint's own processor makes of a black image."""

    def __init__(self, path: Path) -> None:
        from sightline.families.anyvlm.processor import load_processor

        self.processor = load_processor(path)
        config = json.loads((path / "config.json").read_text())
        names = ("image_token_id", "image_token_index")
        self._pad = next(config[name] for name in names if name in config)
        self._process = lru_cache(maxsize=1)(self._process_black)

    def _process_black(self, height: int, width: int) -> tuple[dict[str, np.ndarray], str]:
        from sightline.families.anyvlm.processor import FOREIGN, process

        try:
            return process(self.processor, Image.new("RGB", (width, height)))
        except FOREIGN as error:
            raise ValueError(f"the processor refuses {width}x{height}") from error

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        arrays, _ = self._process(height, width)
        if "image_position_ids" in arrays:  # Gemma 4 pads the patches
            return int((arrays["image_position_ids"] >= 0).all(-1).sum())
        if hasattr(self.processor, "spatial_merge_size"):  # Mistral 3 pads the image
            return int(arrays["image_sizes"].prod()) // self.processor.patch_size**2
        shape = arrays["pixel_values"].shape
        return int(shape[1] if len(shape) == 5 else shape[0])

    def get_number_of_slot_tokens(self, height: int, width: int) -> int:
        """From the first to the last pad in the text that the processor writes for an image."""
        _, text = self._process(height, width)
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        places = [i for i, token_id in enumerate(ids) if token_id == self._pad]
        return places[-1] - places[0] + 1


def _processor_ids(
    checkpoint: Checkpoint,
    messages: Sequence[dict[str, Any]],
    prompt: bool,
    tools: Sequence[dict[str, Any]] | None,
) -> list[int]:
    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return given
        ref = checkpoint.store.get_ref(given["image_url"]["url"].rpartition(":")[2])
        return {"type": "image", "image": checkpoint.store.image(ref)}

    def content(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": given}] if isinstance(given, str) else [*map(part, given)]

    talk = [{**m, "content": content(m["content"])} for m in messages]
    for message in talk:
        if "tool_calls" in message and message["content"] == [{"type": "text", "text": ""}]:
            message["content"] = ""
    encoded = checkpoint.transformers_images.processor.apply_chat_template(
        talk, tools=tools, tokenize=True, return_dict=True, add_generation_prompt=prompt
    )
    return [int(token) for token in encoded["input_ids"][0]]


def _make_arrays(checkpoint: Checkpoint, image: Image.Image) -> dict[str, Any]:
    processor = checkpoint.transformers_images.processor
    # NumPy has no bfloat16. float32 represents each of its values exactly.
    kind = "pt" if checkpoint.case.name == "anyvlm_llama4" else "np"
    processed = processor(images=[image], text=[processor.image_token], return_tensors=kind)
    return {name: a.float().numpy() if kind == "pt" else a for name, a in processed.items()}


def _strip_newlines(reasoning: str) -> str:
    return reasoning.strip("\n")


SERVED_KINDS = ("llava", "idefics3", "internvl", "qwen2_vl", "mistral3", "smolvlm")
"""Types that vLLM serves."""
ALTERNATING = ("gemma3", "mistral3")
CARRIED: dict[str, Callable[[str], str]] = {
    "gemma3": str.strip,
    "gemma4": str.strip,
    "llava_tools": lambda content: content.lstrip("\n"),
}
TWO_FRAMES = ("qwen2_vl",)


def build_case(kind: str) -> Case:
    return Case(
        f"anyvlm_{kind}",
        partial(write_kind, kind),
        Images,
        image_pad="",
        published_template=None,
        takes_tools=kind == "llava_tools",
        takes_reasoning=kind == "llava_tools",
        overrides=(),
        refused_size=(402, 2) if kind in (*TWO_FRAMES, "mistral3", "lfm2_vl") else None,
        # float32, with the frame repeated for towers that process two frames.
        value_bytes=8 if kind in TWO_FRAMES else 4,
        makes_pixels_alone=False,
        alternates=kind in ALTERNATING,
        gradient_tolerance=5e-5 if kind == "gemma4" else 1e-5,
        carried=CARRIED.get(kind, str),
        thought=_strip_newlines,
        processor_ids=_processor_ids,
        make_arrays=_make_arrays,
    )


# Each takes a minute: CI runs the first, a full run all of them.
KINDS = [
    *take_first(["gemma4", "llava", "idefics3", "gemma3", "mistral3", "llava_tools"], 1),
    *(["internvl", "qwen2_vl", "smolvlm"] * IS_FULL),
]
TEXT = Case(
    "anyvlm_llama",
    partial(write_kind, "llama"),
    Images,
    image_pad="",
    published_template=None,
    shows_media=False,
    takes_tools=False,
    overrides=(),
)
CASES: tuple[Case, ...] = (TEXT, *map(build_case, KINDS))
