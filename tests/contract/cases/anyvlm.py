"""The generic family, on checkpoints composed of transformers' classes: each a way in which an
image becomes tokens. The witness is the checkpoint's own processor, called as users call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from shards import IS_FULL, take_first

from tests.contract.case import Case, Checkpoint


def write_kind(kind: str, path: Path) -> None:
    """Write the tiny checkpoint of one kind."""
    from sightline.families.anyvlm import tiny

    tiny.write(path, type=kind)


def count_slot_tokens(processor: Any, made: dict[str, Any], **settings: Any) -> int:
    """From the first to the last pad in the text that a processor writes for an image."""
    tokenizer = processor.tokenizer
    pad = getattr(tokenizer, "image_token_id", processor.image_token_id)
    if hasattr(processor, "img_patch_token"):
        pad = tokenizer.convert_tokens_to_ids(processor.img_patch_token)
    text = processor.replace_image_token(made, 0, **settings)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    places = [i for i, t in enumerate(ids) if t == pad]
    return places[-1] - places[0] + 1


class Images:
    """Counts by the functions of transformers' processor."""

    def __init__(self, path: Path) -> None:
        from sightline.families.anyvlm.processor import load_processor

        self.processor = load_processor(path)
        self.images = self.processor.image_processor

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        if (patch := self._find_patch()) > 0:
            return int(np.prod(self._resize(height, width)) // patch**2)
        if not hasattr(self.images, "get_number_of_image_patches"):
            return 1  # it makes one array of one size
        found = self.images.get_number_of_image_patches(height, width, {})
        return int(found[0] if isinstance(found, tuple) else found)

    def get_number_of_slot_tokens(self, height: int, width: int) -> int:
        return count_slot_tokens(self.processor, self._describe(height, width))

    def _find_patch(self) -> int:
        """Pixels of a patch, where the processor has no method that counts them; else 0."""
        if hasattr(self.images, "max_soft_tokens"):
            return int(self.images.patch_size)
        return int(getattr(self.processor, "patch_size", 0)) * hasattr(
            self.processor, "spatial_merge_size"
        )

    def _resize(self, height: int, width: int) -> tuple[int, int]:
        """The sides of an image that is cut into patches."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            get_resize_output_image_size,
        )

        if hasattr(self.images, "max_soft_tokens"):
            patch, pool = self.images.patch_size, self.images.pooling_kernel_size
            most = self.images.max_soft_tokens * pool**2
            found: tuple[int, int] = get_aspect_ratio_preserving_size(
                height, width, patch, most, pool
            )
            return found
        factor = self.processor.patch_size * self.processor.spatial_merge_size
        image, longest = np.zeros((height, width, 3)), self.images.size["longest_edge"]
        resized: tuple[int, int] = get_resize_output_image_size(
            image, longest, factor, "channels_last"
        )
        if not min(resized):
            raise ValueError("nothing is left of a side")
        return resized

    def _describe(self, height: int, width: int) -> dict[str, Any]:
        """Return the image arrays that the processor reads to write its text."""
        num = self.get_number_of_image_patches(height, width)
        made: dict[str, Any] = {"num_patches": [num], "pixel_values": np.zeros((1, 3, 16, 16))}
        made["num_crops"] = [0]
        if hasattr(self.images, "max_soft_tokens"):
            made["num_soft_tokens_per_image"] = [num // self.images.pooling_kernel_size**2]
        if hasattr(self.processor, "spatial_merge_size"):
            made["image_sizes"] = [self._resize(height, width)]
        if hasattr(self.images, "max_image_size"):
            _, rows, columns = self.images.get_number_of_image_patches(height, width, {})
            shape = (rows, columns) if num > 1 else (0, 0)
            made |= {"rows": [[shape[0]]], "cols": [[shape[1]]]}
        if hasattr(self.images, "merge_size"):
            made["image_grid_thw"] = np.array([[1, 1, num]])
        return made


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
    made = checkpoint.transformers_images.processor.apply_chat_template(
        talk, tools=tools, tokenize=True, return_dict=True, add_generation_prompt=prompt
    )
    return [int(token) for token in made["input_ids"][0]]


def _make_arrays(checkpoint: Checkpoint, image: Image.Image) -> dict[str, Any]:
    processor = checkpoint.transformers_images.processor
    # NumPy has no bfloat16, each value of which float32 has too.
    kind = "pt" if checkpoint.case.name == "anyvlm_llama4" else "np"
    made = processor(images=[image], text=[processor.image_token], return_tensors=kind)
    return {name: a.float().numpy() if kind == "pt" else a for name, a in made.items()}


def _strip_newlines(reasoning: str) -> str:
    return reasoning.strip("\n")


SERVED_KINDS = ("llava", "idefics3", "internvl", "qwen2_vl", "mistral3", "smolvlm")
"""Those that vLLM serves."""
ALTERNATING = ("gemma3", "mistral3")
CARRIED: dict[str, Callable[[str], str]] = {
    "gemma3": str.strip,
    "gemma4": str.strip,
    "llava_tools": lambda content: content.lstrip("\n"),
}
TWO_FRAMES = ("qwen2_vl",)


def build_case(kind: str, load_images: Callable[[Path], Any] = Images) -> Case:
    return Case(
        f"anyvlm_{kind}",
        partial(write_kind, kind),
        load_images,
        image_pad="",
        published_template=None,
        takes_tools=kind == "llava_tools",
        takes_reasoning=kind == "llava_tools",
        overrides=(),
        refused_size=(402, 2) if kind in (*TWO_FRAMES, "mistral3", "lfm2_vl") else None,
        # float32, and the one frame twice where a tower looks at two.
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
CASES: tuple[Case, ...] = tuple(map(build_case, KINDS))
