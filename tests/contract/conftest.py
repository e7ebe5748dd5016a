"""The checkpoints that every family and renderer suite runs on. A new family adds an entry."""

from __future__ import annotations

import ast
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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
    shows_images: bool = True
    takes_tools: bool = True
    takes_reasoning: bool = False
    wants_query: bool = False
    """Whether a conversation needs a user who asks."""
    carried: Callable[[str], str] = str
    """What is left of a content that `parse` gives back."""
    thought: Callable[[str], str] = str
    """Likewise of reasoning."""
    types_arguments: bool = True
    """Whether a call tells the number 1 from the text "1"."""

    def fit(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, less what the chat format has no place for."""
        fitted = [self._fit(m) for m in messages if self.takes_tools or m["role"] != "tool"]
        if not any(m["role"] == "user" for m in fitted) and (self.wants_query or not fitted):
            head = 1 if fitted and fitted[0]["role"] == "system" else 0
            fitted.insert(head, {"role": "user", "content": "well?"})
        return fitted

    def _fit(self, message: dict[str, Any]) -> dict[str, Any]:
        left = dict(message)
        if not self.takes_tools:
            left.pop("tool_calls", None)
        if not self.takes_reasoning or self.fades_reasoning:
            left.pop("reasoning_content", None)
        if not self.shows_images and isinstance(left["content"], list):
            left["content"] = "".join(part.get("text", "") for part in left["content"])
        return left

    overrides: tuple[tuple[str, int], ...] = (("min_pixels", 4096), ("max_pixels", 1 << 20))
    """Processor settings that a run may set, each with a value that is not the checkpoint's."""
    refused_size: tuple[int, int] | None = (402, 2)
    """An image that cannot be laid out; None where there is none."""
    fades_reasoning: bool = False
    """Whether the template leaves out reasoning even of the last answer: then what it keeps is
    tested with the family, and conversations here go without."""
    template_settings: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] = lambda tools: {}
    """What the template is given beside messages and tools."""


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
            **self.case.template_settings(tools or ()),
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


def _tiny(kind: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        from sightline.families.qwen_vl import tiny

        tiny.write(path, type=kind)

    return write


def _with_merges(kind: str) -> Callable[[Path], None]:
    """With the merges that real vocabularies have across newlines, spaces and words.

    They show whether text is tokenized in the runs that the template emits. The model itself does
    not fit these ids; renderers do not load it.
    """

    def write(path: Path) -> None:
        from sightline.families.qwen_vl import tiny

        tiny.write(path, type=kind)
        newlines = (("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "Ċ"), ("Ġ", "Ġ"), ("ĠĊ", "Ċ"))
        words = (
            ("Ġ", "a"), ("t", "h"), ("th", "e"), ("Ġ", "the"), (".", "Ċ"), (".Ċ", "Ċ"), ('"', ":"),
        )  # fmt: skip
        tokenizer = tiny.make_tokenizer((*tiny.MERGES, *newlines, *words))
        tokenizer.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"})
        )
        config = json.loads((path / "config.json").read_text())
        text_config = config.get("text_config", config)
        text_config["vocab_size"] = tokenizer.get_vocab_size(with_added_tokens=True) + 7
        (path / "config.json").write_text(json.dumps(config))

    return write


def _load_qwen_images(path: Path) -> Any:
    # By name: AutoImageProcessor wants torchvision in some of the versions that we support.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)


def _write_kimi(path: Path) -> None:
    from sightline.families.kimi_k25 import tiny

    tiny.write(path)


def _write_kimi_with_merges(path: Path) -> None:
    """With merges across newlines, spaces and words, and marks of reasoning that are tokens."""
    from sightline.families.kimi_k25 import tiny

    tiny.write(path)
    newlines = (("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("Ġ", "Ċ"), ("Ġ", "Ġ"), ("ĠĊ", "Ċ"))
    words = (("Ġ", "a"), ("th", "e"), ("Ġ", "the"), (".", "Ċ"), (".Ċ", "Ċ"), ('"', ":"), (">", "A"))
    tokenizer = tiny.make_tokenizer((*tiny.MERGES, *newlines, *words), think_tokens=True)
    tokenizer.save(str(path / "tokenizer.json"))
    described = tiny.tokenizer_config(tokenizer)
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["vocab_size"] = tokenizer.get_vocab_size(with_added_tokens=True) + 7
    config["image_token_id"] = tokenizer.token_to_id("<|media_pad|>")
    (path / "config.json").write_text(json.dumps(config))


class KimiImages:
    """Counts patches by the function of transformers' processor.

    The processor itself imports torchvision, which this machine has not: the function is taken
    out of its source.
    """

    def __init__(self, path: Path) -> None:
        import transformers

        folder = Path(transformers.__file__).parent / "models" / "kimi_k25"
        tree = ast.parse((folder / "image_processing_kimi_k25.py").read_text())
        found = [
            n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "navit_resize"
        ]
        names: dict[str, Any] = {"math": math}
        exec(compile(ast.Module(found, []), "navit_resize", "exec"), names)
        self.resize: Callable[..., Any] = names["navit_resize"]
        self.raw = json.loads((path / "preprocessor_config.json").read_text())
        self.merge_size = int(self.raw["merge_size"])

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        raw = self.raw
        limits = (raw["max_patches"], raw["size"]["max_height"])
        _, padded = self.resize(height, width, raw["patch_size"], self.merge_size, *limits)
        return int(math.prod(padded)) // int(raw["patch_size"]) ** 2


def _kimi_settings(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from sightline.families.kimi_k25.declare import declare

    # The published tokenizer makes the declaration in Python and hands it to the template.
    return {"thinking": False, "tools_ts_str": declare(tools)}


def _qwen(name: str, write: Callable[[Path], None], template: str, **traits: Any) -> Case:
    published = SHARED / "references" / f"{template}_chat_template.jinja" if template else None
    return Case(name, write, _load_qwen_images, "<|image_pad|>", published, **traits)


def _kimi(name: str, write: Callable[[Path], None]) -> Case:
    return Case(name, write, KimiImages, "<|media_pad|>", None, **_PADDED)


def _strip_newlines(text: str) -> str:
    return text.strip("\n")


def _lead(text: str) -> str:
    return text.lstrip("\n")


_THINKS = {"takes_reasoning": True, "carried": _lead, "thought": _strip_newlines}
_PADDED = {
    "overrides": (("max_pixels", 1 << 20),),
    "refused_size": None,
    "takes_reasoning": True,
    "fades_reasoning": True,
    "template_settings": _kimi_settings,
}
_TAGGED = {
    "takes_reasoning": True,
    "wants_query": True,
    "carried": str.strip,
    "thought": str.strip,
    "types_arguments": False,
}

CASES = (
    _qwen("qwen3_vl", _tiny("qwen3_vl"), "qwen3_vl"),
    _qwen("qwen3_vl_merges", _with_merges("qwen3_vl"), "qwen3_vl"),
    _qwen("qwen3_vl_thinking", _with_merges("qwen3_vl_thinking"), "", **_THINKS),
    _qwen("qwen2_5_vl", _with_merges("qwen2_5_vl"), "qwen2_5_vl", takes_tools=False),
    _qwen("qwen3_5", _with_merges("qwen3_5"), "qwen3_5", **_TAGGED),
    _qwen("qwen3", _with_merges("qwen3"), "qwen3", shows_images=False, **_THINKS),
    _kimi("kimi_k25", _write_kimi),
    _kimi("kimi_k25_merges", _write_kimi_with_merges),
)
SEEING = tuple(case for case in CASES if case.shows_images)


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Checkpoint]:
    """Loads a case, each once."""

    @cache
    def loaded(case: Case) -> Checkpoint:
        path = tmp_path_factory.mktemp(case.name)
        case.write(path)
        return Checkpoint(case, path, MediaStore(tmp_path_factory.mktemp("media")))

    return loaded


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def checkpoint(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    return load(request.param)


@pytest.fixture(scope="session", params=SEEING, ids=lambda case: case.name)
def seeing(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint that shows images."""
    return load(request.param)


@pytest.fixture(
    scope="session",
    params=[case for case in CASES if case.published_template],
    ids=lambda case: case.name,
)
def templated(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint whose published template can be had; the others' witness is in golden/."""
    return load(request.param)


@pytest.fixture
def editable(seeing: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the checkpoint's folder that a test may damage."""
    return Path(shutil.copytree(seeing.path, tmp_path / "copy"))
