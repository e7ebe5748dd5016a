"""Load and run the checkpoint's own transformers processor, for images only.

The processor uses Pillow, or torchvision if transformers has no Pillow implementation.
"""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from sightline.errors import FamilyError, Misaligned
from sightline.families.anyvlm.findings import UNSUPPORTED, Findings
from sightline.families.anyvlm.layout import RULES
from sightline.families.checkpoint_files import hide_pad_warning, read_json
from sightline.message import Message, TextPart, VideoPart
from sightline.render import ChatTemplate
from sightline.render.protocol import Tools

FOREIGN = (
    ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that third-party code raises for unsupported checkpoints."""
TORCHVISION = (
    "torchvision", "torchvision.transforms", "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)  # fmt: skip
OPTIONS = {"local_files_only": True, "trust_remote_code": False}


@lru_cache(maxsize=4)
def load_processor(path: Path) -> Any:
    """Load the processor of a checkpoint folder, or the tokenizer of a text-only one.

    Video processors need torchvision. If it is not installed, the processor is built without its
    video part. This also covers modules that import torchvision but process images with Pillow.
    """
    hide_pad_warning()
    if "vision_config" not in read_json(path / "config.json"):
        return AutoTokenizer.from_pretrained(path, **OPTIONS)
    try:
        return AutoProcessor.from_pretrained(path, backend="pil", **OPTIONS)
    except (ImportError, ValueError) as error:
        names = ("video processor", "torchvision", "could not import module")
        can_do_without = any(name in str(error).lower() for name in names)
        settings = _read_processor_settings(path)
        if not can_do_without or "processor_class" not in settings:
            raise
    kind = _import_processor(settings["processor_class"])

    class ImagesOnly(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name in UNUSED:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    ImagesOnly.__name__ = kind.__name__  # refusals name it
    tokenizer = AutoTokenizer.from_pretrained(path, **OPTIONS)
    parameters = inspect.signature(kind.__init__).parameters
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil", **OPTIONS),
        "tokenizer": tokenizer,
        **{name: UNUSED[name] for name in UNUSED if name in parameters},
        "chat_template": tokenizer.chat_template,
    }
    # `save_pretrained` writes the settings of all parts into the same file.
    options = {n: value for n, value in settings.items() if n in parameters and n not in parts}
    return ImagesOnly(**parts, **options)


def check_processor(processor: Any, path: Path) -> None:
    """Raise FamilyError for a processor that cannot process images in a chat."""
    if getattr(processor, "image_processor", None) is None:
        raise FamilyError(f"{type(processor).__name__} takes no images", UNSUPPORTED)
    if getattr(processor, "image_token", None) is None:
        raise FamilyError("the processor names no token for an image", UNSUPPORTED)
    method = getattr(type(processor), "replace_image_token", None)
    if method in (None, ProcessorMixin.replace_image_token):
        raise FamilyError(
            f"{type(processor).__name__} does not tell which tokens belong to an image: it writes "
            "them and changes the text around them in one step, and has no replace_image_token",
            UNSUPPORTED,
        )
    if not (processor.chat_template or processor.tokenizer.chat_template):
        fix = "copy chat_template.jinja from the checkpoint. Base models have none and cannot chat"
        raise FamilyError(f"{path} has no chat template", fix)
    if processor.image_token not in processor.tokenizer.get_vocab():
        raise FamilyError(
            f"the tokenizer lacks {processor.image_token!r}, the processor's token for an image",
            "copy tokenizer.json and tokenizer_config.json from the checkpoint",
        )


def get_tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def find_image_text(processor: Any) -> str:
    """Return the text that chat templates write for an image, which the processor replaces."""
    return str(getattr(processor, "image_placeholder_token", processor.image_token))


def uses_torchvision(processor: Any) -> bool:
    kinds = type(getattr(processor, "image_processor", None)).__mro__
    return any(kind.__name__ == "TorchvisionBackend" for kind in kinds)


def _read_processor_settings(path: Path) -> dict[str, Any]:
    """Return a folder's processor settings. Older folders only contain the class name."""
    if (file := path / "processor_config.json").is_file():
        return read_json(file)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        settings = read_json(path / name) if (path / name).is_file() else {}
        if "processor_class" in settings:
            return {"processor_class": settings["processor_class"]}
    return {}


class _NoVideos:
    """A video processor without settings, for processors that read them even without videos."""

    model_input_names: list[str] = []

    def __getattr__(self, name: str) -> None:
        return None


UNUSED = {"video_processor": _NoVideos(), "feature_extractor": None}
"""Processor parts for videos and audio, which are not supported, and what replaces them."""


class _Absent:
    """A placeholder for any name of a package that is not installed."""

    def __getattr__(self, name: str) -> _Absent:
        return self


def _import_processor(name: str) -> Any:
    """Import a processor class. If torchvision is not installed, replace it by placeholders."""
    models = [model for model, names in PROCESSOR_MAPPING_NAMES.items() if name in names]
    model = model_type_to_module_name(models[0]) if models else name
    # Check the metadata, because another thread may have put placeholders into sys.modules.
    missing = () if any(metadata.distributions(name="torchvision")) else TORCHVISION
    for part in missing:
        sys.modules[part] = stand_in = ModuleType(part)
        stand_in.__dict__.update(__path__=[], __getattr__=lambda _: _Absent())
    try:
        file = import_module(f"transformers.models.{model}.processing_{model}")
    finally:
        for part in missing:
            sys.modules.pop(part, None)
    return getattr(file, name)


def process(processor: Any, image: Image.Image) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays of one image, and the text that represents it in a prompt."""
    kind = "pt" if uses_torchvision(processor) else "np"
    options = {"return_tensors": kind, "return_text_replacement_offsets": True}
    outputs = processor(images=[[image]], text=[find_image_text(processor)], **options)
    texts = outputs.pop("text_replacement_offsets")
    if [len(parts) for parts in texts] != [1]:
        counts = ", ".join(str(len(parts)) for parts in texts)
        raise ValueError(f"from one prompt with one image it returns prompts with {counts} images")
    ((replaced,),) = texts
    names = [name for name in outputs if name not in processor.tokenizer.model_input_names]
    arrays = {name: to_array(outputs[name]) for name in names if "token_type" not in name}
    sides = set(arrays["pixel_values"].shape) if "pixel_values" in arrays else set()
    for name, array in arrays.items():
        if name.endswith("mask") and not set(array.shape) <= sides:
            raise ValueError(f"the shape of {name} does not match the pixels")
    return arrays, replaced["replacement"]


def to_array(output: Any) -> np.ndarray:
    """Return a processor's output as a numpy array, bfloat16 as float32."""
    is_narrow = str(getattr(output, "dtype", "")) == "torch.bfloat16"
    return np.asarray(output.float() if is_narrow else output)


def to_template_content(
    message: Message, images: list[Image.Image], shows_media: bool
) -> list[dict[str, Any]] | str:
    """Return a message's content for `apply_chat_template`, with `images` matched by size.

    The content is a string for a text-only checkpoint, as most of their templates require.
    """
    if not shows_media:
        return message.text
    if not message.content:
        return [{"type": "text", "text": ""}]
    by_size = {image.size: image for image in images}
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image", "image": by_size[part.ref.width, part.ref.height]}
        for part in message.content
        if not isinstance(part, VideoPart)  # refused by the renderer
    ]


def apply_template(
    processor: Any,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    prompt: bool = True,
    tools: Tools | None = None,
    **options: Any,
) -> tuple[str, Any]:
    """Return the text of a conversation, and the ids and arrays that the processor makes from it.

    transformers gets a template that only writes the text, which `template` renders within limits.
    """
    templates = processor.chat_template or get_tokenizer(processor).chat_template
    if template.source != (templates.get("default") if isinstance(templates, dict) else templates):
        raise FamilyError("transformers finds another chat template in the folder", UNSUPPORTED)
    forms = [{**message, "content": _hide_images(message["content"])} for message in messages]
    values: dict[str, Any] = dict(get_tokenizer(processor).special_tokens_map)
    text = template.render(forms, tools, prompt, **values)
    options |= {"tokenize": True, "return_dict": True}
    options |= {"processor_kwargs": process_options(processor), "rendered_text": text}
    inputs = processor.apply_chat_template(messages, chat_template="{{ rendered_text }}", **options)
    return text, inputs


def process_options(processor: Any) -> dict[str, bool]:
    """Return the options of `apply_chat_template` for a processor that the model's code needs."""
    # Padding is off by default. Passing a setting keeps SmolVLM's processor from adding its own,
    # which causes a warning.
    options = {"padding": False}
    if "mm_token_type_ids" in processor.model_input_names:  # off by default for Cosmos3-Edge
        options["return_mm_token_type_ids"] = True
    return options


def _hide_images(parts: list[dict[str, Any]] | str) -> list[dict[str, Any]] | str:
    if isinstance(parts, str):
        return parts
    return [{**part, "image": ""} if "image" in part else part for part in parts]


def cut_patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Cut (channels, height, width) into (patches, channels, patch, patch), in row order."""
    channels, height, width = pixels.shape
    lines = pixels.reshape(channels, height // patch, patch, width // patch, patch)
    return lines.transpose(1, 3, 0, 2, 4).reshape(-1, channels, patch, patch)


def make_rows(path: Path, findings: Findings, image: Image.Image) -> np.ndarray:
    """Return uint8 (rows, bytes per row). A row has one entry of every stored array."""
    if image.mode != "RGB":
        image = image.convert("RGB")
    arrays, _ = process(load_processor(path), image)
    parts = []
    shape = RULES[findings.rule][0](image.width, image.height, findings.rule_settings) or (0, 0)
    for spec in findings.arrays:
        array = arrays[spec.name]
        if findings.rule == "lines":
            array = cut_patches(array[0], spec.shape[-1])
        array = array[0] if spec.has_batch else array
        if spec.fill is not None:
            array = array[: shape[0] * shape[1]]
        if array.shape[1:] != spec.shape or array.dtype.name != spec.dtype:
            raise Misaligned(
                f"the processor returned {spec.name} of {array.dtype} {array.shape}, but the "
                f"trials found {spec.dtype} {spec.shape} for each entry",
                "install the same transformers in every environment of the run",
            )
        if not spec.is_ones:
            parts.append(np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8))
        elif not (array == 1).all():
            raise FamilyError(
                f"the processor masks a part of this image in {spec.name}, which is not supported",
                "resize the image before it is put into the store",
            )
    return np.ascontiguousarray(np.concatenate(parts, axis=1))
