"""A checkpoint folder of an unknown type, as the trials see it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import UNSUPPORTED
from sightline.families.anyvlm.forward import find_auto_class
from sightline.families.anyvlm.image_tokens import ImageTokens
from sightline.families.anyvlm.processor import (
    FOREIGN,
    OPTIONS,
    apply_template,
    check_processor,
    get_tokenizer,
    load_processor,
)
from sightline.families.anyvlm.render import AnyVLMRenderer
from sightline.families.checkpoint_files import first_line
from sightline.render import ChatTemplate
from sightline.render.protocol import Tools
from sightline.wire.codec import find_version


class Checkpoint:
    """A checkpoint folder, whose config, processor and model code are loaded on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> Any:
        try:
            config = AutoConfig.from_pretrained(self.path, **OPTIONS)
        except ValueError as error:
            raise FamilyError(first_line(error), UNSUPPORTED) from error
        auto = find_auto_class(config)
        is_text = auto is AutoModelForCausalLM
        if is_text and type(config) in AutoModelForImageTextToText._model_mapping:
            raise FamilyError(
                f"transformers lists {config.model_type!r} as an image-and-text type, but its "
                "config.json has no vision_config, which describes a vision tower",
                UNSUPPORTED,
            )
        if type(config) not in auto._model_mapping:
            version, kind = find_version("transformers"), "text" if is_text else "image-and-text"
            raise FamilyError(
                f"transformers {version} has no {kind} class for {config.model_type!r}", UNSUPPORTED
            )
        return config

    @cached_property
    def model(self) -> Any:
        with torch.device("meta"):
            return find_auto_class(self.config).from_config(self.config)

    @property
    def shows_media(self) -> bool:
        return hasattr(self.config, "vision_config")

    @property
    def base(self) -> Any:
        return getattr(self.model, "model", self.model)

    @cached_property
    def processor(self) -> Any:
        """The processor, or the tokenizer of a text-only checkpoint."""
        names = ("preprocessor_config.json", "processor_config.json")
        if self.shows_media and not any((self.path / name).is_file() for name in names):
            raise FamilyError(
                f"the folder has neither {' nor '.join(names)}, so transformers cannot load it",
                "copy these files from the checkpoint",
            )
        try:
            processor = load_processor(self.path)
        except FOREIGN as error:
            if "Missing optional dependencies: torchvision" in str(error):
                raise FamilyError(
                    "transformers implements it with torchvision only, which is not installed here",
                    "install the torchvision that matches your torch, in the environments of the "
                    "server and of the trainer",
                ) from error
            raise FamilyError(
                f"transformers cannot load it: {first_line(error)}",
                "install the package that it names, complete the folder, or use another checkpoint",
            ) from error
        if self.shows_media:
            check_processor(processor, self.path)
        return processor

    @property
    def tokenizer(self) -> Any:
        return get_tokenizer(self.processor)

    @cached_property
    def images(self) -> ImageTokens:
        return ImageTokens(self.path, self.processor)

    @cached_property
    def template(self) -> ChatTemplate:
        return AnyVLMRenderer.find_template(self.path)

    def encode(
        self, messages: list[dict[str, Any]], prompt: bool = True, tools: Tools | None = None
    ) -> tuple[str, list[int]]:
        """Return the text of a conversation, and its tokens from the checkpoint's own processor."""
        text, inputs = apply_template(self.processor, self.template, messages, prompt, tools)
        return text, [int(token) for token in np.asarray(inputs["input_ids"]).reshape(-1)]
