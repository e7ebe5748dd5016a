"""A checkpoint under test, with reference implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from sightline import MediaRef, MediaStore
from sightline.families import Family, load_family, load_renderer
from sightline.render import Renderer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokens.json"

# Sizes on both sides of the pixel limits of the tiny checkpoints, in several shapes.
IMAGE_SIZES = ((32, 32), (64, 32), (33, 95), (8, 8), (160, 96), (300, 20))

EXTRA_MERGES = (
    ("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "Ċ"), ("Ġ", "Ġ"), ("ĠĊ", "Ċ"), ("Ġ", "a"),
    ("t", "h"), ("th", "e"), ("Ġ", "the"), (".", "Ċ"), (".Ċ", "Ċ"), ('"', ":"),
)  # fmt: skip
"""Merges across newlines, spaces and words, as published vocabularies have them. They show whether
text is tokenized in the runs that the template emits."""


@dataclass(frozen=True)
class Case:
    """One checkpoint under test, with reference implementations."""

    name: str
    write: Callable[[Path], None]
    load_images: Callable[[Path], Any]
    """A witness that counts patches: `get_number_of_image_patches(height, width)`, which raises
    ValueError for an image that cannot be laid out, and `merge_size`. transformers' Pillow image
    processor of a checkpoint folder, where it has one."""
    image_pad: str
    published_template: Path | None
    """The chat template of the family's own release, where this machine has it."""
    golden: Path = GOLDEN
    """A file of recorded tokens, by the name of the case."""
    has_weights: bool = True
    """False if the tokenizer's ids do not fit the weights."""
    shows_media: bool = True
    shows_videos: bool = False
    mixes_media: bool = True
    """Whether transformers' model takes images and videos in one prompt."""
    video_mark: str = ""
    """The text that the chat template writes for a video."""
    write_video: Callable[[Family, dict[str, Any]], str] = lambda family, inputs: ""
    """Build the text with which transformers' processor replaces the mark, from grids and times."""
    video_setting: str = '{"fps": 1}'
    """A setting of the video processor, as JSON, by which a video has fewer tokens."""
    shows_system_images: bool = False
    """Whether a system message can show images, too."""
    takes_tools: bool = True
    takes_reasoning: bool = False
    wants_query: bool = False
    """Whether a conversation needs a user's question."""
    alternates: bool = False
    """Whether user and assistant take turns, the user first, and the template refuses all else."""
    carried: Callable[[str], str] = str
    """Return the part of a message's content that `parse` preserves."""
    thought: Callable[[str], str] = str
    """Return the part of a message's reasoning that `parse` preserves."""
    types_arguments: bool = True
    """Whether a call distinguishes the number 1 from the text "1"."""
    overrides: tuple[tuple[str, int], ...] = (("min_pixels", 4096), ("max_pixels", 1 << 20))
    """Processor settings that a run may set, each with a value that is not the checkpoint's."""
    refused_size: tuple[int, int] | None = (402, 2)
    """An image that cannot be laid out, or None."""
    fades_reasoning: bool = False
    """Whether the template leaves out reasoning even of the last answer: then what it keeps is
    tested with the family, and conversations here go without."""
    openers: tuple[tuple[str, str], ...] = ()
    """Each role's opening token, if an assistant turn ends with that of the next turn."""
    closes_reasoning: bool = False
    """Whether the header of a turn closes an empty reasoning block, so completions have none."""
    has_own_format: bool = True
    """False where another case has its chat format and its pixels: then it computes, no more.

    Of two that differ in the merges of their tokenizers a quick run takes the one that merges."""
    value_bytes: int = 1
    """Bytes that patches store for each pixel value."""
    gradient_tolerance: float = 1e-5
    """How far packed gradients may be from those of each sequence alone, of their size: rounding,
    which is more where a tower sums over hundreds of patches of the smallest image."""
    makes_pixels_alone: bool = True
    """Whether pixels are computed without transformers instead of by its processor."""
    processor_ids: Callable[..., list[int]] | None = None
    """The witness of tokens where it is not the tokenizer's template with its pads repeated: what
    the checkpoint's own processor makes of messages, with or without a generation prompt, and of
    tools."""
    make_arrays: Callable[[Checkpoint, Image.Image], dict[str, Any]] | None = None
    """The arrays that the checkpoint's own processor, on Pillow, makes of an image; None where it
    has none."""
    as_given: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list
    """Messages as the published template wants them."""
    template_settings: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] = lambda tools: {}
    """Return the template's variables other than messages and tools."""

    @property
    def sampled_reasoning(self) -> str | None:
        """Reasoning that a completion may hold."""
        return "hm" if self.takes_reasoning and not self.closes_reasoning else None

    def fit(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages, without the parts that the chat format does not support."""
        fitted = [self._fit(m) for m in messages if self.takes_tools or m["role"] != "tool"]
        wants_query = self.wants_query or self.alternates or not fitted
        if wants_query and not any(m["role"] == "user" for m in fitted):
            head = 1 if fitted and fitted[0]["role"] == "system" else 0
            fitted.insert(head, {"role": "user", "content": "well?"})
        return _take_turns(fitted) if self.alternates else fitted

    def _fit(self, message: dict[str, Any]) -> dict[str, Any]:
        left = dict(message)
        if not self.takes_tools:
            left.pop("tool_calls", None)
        if not self.takes_reasoning or self.fades_reasoning:
            left.pop("reasoning_content", None)
        if not self.shows_media and isinstance(left["content"], list):
            left["content"] = "".join(part.get("text", "") for part in left["content"])
        return left


class Checkpoint:
    """A case, loaded."""

    def __init__(self, case: Case, path: Path, store: MediaStore) -> None:
        self.case = case
        self.path = path
        self.store = store
        self.family: Family = load_family(path)
        self.renderer: Renderer = load_renderer(path, store)
        self.refs: list[MediaRef] = [
            store.put(Image.new("RGB", size, (40 * i, 90, 200)))
            for i, size in enumerate(IMAGE_SIZES)
        ]

    @cached_property
    def transformers_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    @cached_property
    def transformers_images(self) -> Any:
        return self.case.load_images(self.path)

    def template_ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
        template: str | None = None,
    ) -> list[int]:
        """Return transformers' tokens for the messages, each image pad repeated for its image.

        `template` None stands for the checkpoint's own.
        """
        if self.case.processor_ids is not None:
            return self.case.processor_ids(self, messages, generation_prompt, tools or None)
        tokenizer = self.transformers_tokenizer
        ids = tokenizer.apply_chat_template(
            self.case.as_given(messages),
            tools=tools or None,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=True,
            return_dict=False,
            **self.case.template_settings(tools or ()),
        )
        counts = [self._num_tokens(part) for part in _image_parts(messages)]
        pad = tokenizer.convert_tokens_to_ids(self.case.image_pad)
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * (counts.pop(0) if token == pad else 1))
        assert not counts
        if self.case.openers and not generation_prompt and messages[-1]["role"] == "assistant":
            # The template does not end the last turn, so no model would learn to stop.
            following = "tool" if messages[-1].get("tool_calls") else "user"
            expanded.append(tokenizer.convert_tokens_to_ids(dict(self.case.openers)[following]))
        return expanded

    def num_slot_tokens(self, height: int, width: int) -> int:
        """By the witness: tokens from the first to the last pad of an image."""
        processor = self.transformers_images
        if hasattr(processor, "get_number_of_slot_tokens"):
            return int(processor.get_number_of_slot_tokens(height, width))
        patches = processor.get_number_of_image_patches(height, width)
        return int(patches) // processor.merge_size**2

    def _num_tokens(self, part: dict[str, Any]) -> int:
        digest = part["image_url"]["url"].rpartition(":")[2]
        ref = self.store.get_ref(digest)
        return self.num_slot_tokens(ref.height, ref.width)


def _take_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, without those that follow one of the same role."""
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant" and (not steps or steps[-1]["role"] == "system"):
            steps.append({"role": "user", "content": "well?"})
        if not steps or steps[-1]["role"] != message["role"]:
            steps.append(message)
    return steps


def _image_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
