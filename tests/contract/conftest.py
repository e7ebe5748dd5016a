"""The checkpoints that every family and renderer suite runs on. A new family adds an entry."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sightline import MediaRef, MediaStore
from sightline.families import Family, load_family, load_renderer
from sightline.render import Renderer

SHARED = Path(__file__).parents[2].parent / "shared"

# Sizes on both sides of the pixel limits of the checkpoints below, in several shapes.
IMAGE_SIZES = ((32, 32), (64, 32), (33, 95), (8, 8), (160, 96), (300, 20))


@dataclass(frozen=True)
class Case:
    """One checkpoint under test, and what witnesses that it is read rightly."""

    name: str
    write: Callable[[Path], None]
    load_images: Callable[[Path], Any]
    """transformers' Pillow image processor of a checkpoint folder."""
    image_pad: str
    published_template: Path | None
    """The chat template of the family's own release, where this machine has it."""


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
        """What transformers makes of the messages, each image pad repeated for its image.

        `template` None stands for the checkpoint's own.
        """
        tokenizer = self.transformers_tokenizer
        ids = tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=True,
            return_dict=False,
        )
        counts = [self._num_tokens(part) for part in _image_parts(messages)]
        pad = tokenizer.convert_tokens_to_ids(self.case.image_pad)
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * (counts.pop(0) if token == pad else 1))
        assert not counts
        return expanded

    def _num_tokens(self, part: dict[str, Any]) -> int:
        digest = part["image_url"]["url"].rpartition(":")[2]
        ref = self.store.find(digest)
        processor = self.transformers_images
        patches = processor.get_number_of_image_patches(ref.height, ref.width)
        return int(patches) // processor.merge_size**2


def _image_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def _write_qwen3_vl(path: Path) -> None:
    from sightline.families.qwen_vl import tiny

    tiny.write(path)


def _write_qwen3_vl_with_merges(path: Path) -> None:
    """With the merges that real vocabularies have across newlines, spaces and words.

    They show whether text is tokenized in the runs that the template emits. The model itself does
    not fit these ids; renderers do not load it.
    """
    from sightline.families.qwen_vl import tiny

    tiny.write(path)
    newlines = (("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "Ċ"), ("Ġ", "Ġ"), ("ĠĊ", "Ċ"))
    words = (("Ġ", "a"), ("t", "h"), ("th", "e"), ("Ġ", "the"), (".", "Ċ"), (".Ċ", "Ċ"), ('"', ":"))
    tokenizer = tiny.make_tokenizer((*tiny.MERGES, *newlines, *words))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"})
    )
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["vocab_size"] = tokenizer.get_vocab_size(with_added_tokens=True) + 7
    (path / "config.json").write_text(json.dumps(config))


def _load_qwen_images(path: Path) -> Any:
    # By name: AutoImageProcessor wants torchvision in some of the versions that we support.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)


_QWEN3_VL = SHARED / "references" / "qwen3_vl_chat_template.jinja"

CASES = (
    Case("qwen3_vl", _write_qwen3_vl, _load_qwen_images, "<|image_pad|>", _QWEN3_VL),
    Case(
        "qwen3_vl_merges",
        _write_qwen3_vl_with_merges,
        _load_qwen_images,
        "<|image_pad|>",
        _QWEN3_VL,
    ),
)


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    case: Case = request.param
    path = tmp_path_factory.mktemp(case.name)
    case.write(path)
    return Checkpoint(case, path, MediaStore(tmp_path_factory.mktemp("media")))


@pytest.fixture
def editable(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the checkpoint's folder that a test may damage."""
    return Path(shutil.copytree(checkpoint.path, tmp_path / "copy"))
