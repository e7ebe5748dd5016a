"""The torch half of the generic family, which calls the parts of a transformers model separately.

`get_image_features` computes the features that replace embeddings of the text model. The text model
uses our attention patterns. If its layers do more than causal attention, it uses its own attention
over padded rows. After the weights are loaded, `weights_trial` compares the logits of the parts
with those of the whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import UNSUPPORTED
from sightline.families.anyvlm.vision import AnyVLMFamily, join_patches
from sightline.families.anyvlm.weights_trial import WeightsTrial
from sightline.families.protocol import EngineTrial, Grid
from sightline.families.transformers_forward import (
    TextForward,
    join_images,
    join_layers,
    load_model,
    refuse_errors,
)
from sightline.media import MediaRef

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""The names of the argument that marks image tokens."""


def find_auto_class(config: Any) -> Any:
    """Return the class that builds the model of a transformers config."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def find_text(model: Any) -> Any:
    """Return the module with the decoder's `layers`, or None."""
    text = model.get_decoder()
    while text is not None and not hasattr(text, "layers"):
        text = getattr(text, "model", None)
    return text


def find_encoder(model: Any) -> Any:
    """Return the module with `get_image_features`: the model or its body. None if there is none."""
    parts = (model, getattr(model, "model", None))
    return next((part for part in parts if hasattr(part, "get_image_features")), None)


class AnyVLMForward(TextForward):
    def __init__(self, model: Any, family: AnyVLMFamily, attention: str) -> None:
        text = find_text(model)
        if text is None or model.get_output_embeddings() is None:
            problem = f"{type(model).__name__} has no decoder with layers, or no output head"
            raise FamilyError(problem, UNSUPPORTED)
        super().__init__(model, text)
        self.family = family
        self._attends_itself = family.packing.kind == "rows"
        self._attention = "sdpa" if self._attends_itself else attention
        self._set_attention(self._attention)

    def _set_attention(self, name: str) -> None:
        """Set the text model's attention. The tower keeps its own."""
        for module in self._text.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = name

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        # Computed on each call, because sharding replaces parameters.
        text_ids = {id(p) for part in (self._text, self._head) for p in part.parameters()}
        return [(n, p) for n, p in self.model.named_parameters() if id(p) not in text_ids]

    def blocks(self) -> list[nn.Module]:
        """Return the decoder layers and the tower's layers (its longest `ModuleList`)."""
        vision_ids = {id(parameter) for _, parameter in self.vision_parameters()}
        lists = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.ModuleList)
            and all(id(parameter) in vision_ids for parameter in module.parameters())
        ]
        return [*self._text.layers, *max(lists, key=len, default=[])]

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid] | None:
        if not self.family.shows_media:
            return None
        image = Image.new("RGB", (32, 32), (90, 120, 150))
        item = self.family.item(MediaRef("0" * 64, "image/png", 32, 32, 1))
        return torch.from_numpy(self.family.patches(image, item)), item.grid

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        findings = self.family.findings
        if findings.rule == "lines" and len(patches) == findings.merge**2:
            # transformers squeezes the axis of a single token.
            return self.encode(patches.repeat(2, 1), grids * 2)[:1]
        arrays = self.read_arrays(patches, grids)
        model: Any = self.model
        output = find_encoder(model).get_image_features(**arrays, return_dict=True)
        features = output.pooler_output
        if features is None:  # the model projects the tower's output itself
            features = model.multi_modal_projector(output.last_hidden_state)
        return join_layers(join_images(features), output)

    def read_arrays(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> dict[str, Tensor]:
        """Return the arrays that the checkpoint's processor computed for these images, by name."""
        findings = self.family.findings
        arrays: dict[str, Tensor] = {}
        dtype = self.vision_parameters()[0][1].dtype
        for spec, own in findings.cut_row():
            if spec.is_ones:
                kind = getattr(torch, spec.dtype)
                array = torch.ones(len(patches), *spec.shape, dtype=kind, device=patches.device)
            else:
                part = patches[:, own].contiguous()
                array = part.view(getattr(torch, spec.dtype)).view(len(patches), *spec.shape)
            array = array.to(dtype) if array.is_floating_point() else array
            if findings.rule == "lines":
                array = _join_patches(array, grids)
            if spec.fill is not None:
                counts = [rows * columns for _, rows, columns in grids]
                arrays[spec.name] = pad_sequence(array.split(counts), True, float(spec.fill))
                continue
            arrays[spec.name] = array[None] if spec.has_batch else array
        if name := findings.grid_array:
            sizes = torch.tensor(grids, device=patches.device)
            if findings.rule == "lines":
                sizes = sizes[:, 1:] * findings.rule_settings["patch"]
            arrays[name] = sizes
        return arrays

    def hidden(
        self,
        token_ids: Int[Tensor, "rows length"],
        positions: Int[Tensor, "axes rows length"],
        features: Float[Tensor, "visual_tokens features"] | None,
        feature_indices: Int[Tensor, " visual_tokens"] | None,
        attention: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        if not self._attends_itself:
            return super().hidden(token_ids, positions, features, feature_indices, attention)
        embeds = self._text.embed_tokens(token_ids[0])
        is_image = torch.zeros_like(token_ids[0])
        if features is not None and feature_indices is not None:
            embeds = embeds.index_copy(0, feature_indices, features.to(embeds.dtype))
            is_image[feature_indices] = 1
        ends = np.unique(attention.subtree_end)
        starts = np.concatenate([[0], ends[:-1]])
        along = np.arange(int((ends - starts).max()))
        # Padding is at the end of a row, so real tokens do not attend to it.
        places = np.minimum(starts[:, None] + along, ends[:, None] - 1)
        index = torch.from_numpy(places).to(token_ids.device)
        is_real = torch.from_numpy(along < (ends - starts)[:, None]).to(token_ids.device)
        base: Any = getattr(self.model, "model", self._text)
        names = inspect.signature(type(base).forward).parameters
        kinds = {n: is_image[index] * is_real for n in TOKEN_TYPES if n in names}
        if getattr(self._text.config, "hidden_size_per_layer_input", 0):
            # Image tokens use the per-layer embeddings of the padding token.
            plain = token_ids[0].masked_fill(is_image > 0, self._text.config.pad_token_id)
            kinds["per_layer_inputs"] = self._text.get_per_layer_inputs(plain[index], None)
        kinds |= {"inputs_embeds": embeds[index], "attention_mask": is_real.long()}
        along_axes = positions[:, 0, index] if len(positions) > 1 else positions[0, 0, index]
        out = base(position_ids=along_axes, use_cache=False, **kinds)
        return out.last_hidden_state[is_real][None]

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        logits = super().logits(hidden)
        cap = getattr(self._text.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @contextmanager
    def use_own_attention(self) -> Iterator[None]:
        """Let the model run as transformers defines it, inside the context."""
        self._set_attention("eager")
        method = vars(self._text).pop("_deepstack_process", None)  # use the model's own method
        try:
            yield
        finally:
            self._set_attention(self._attention)
            if method is not None:
                self._text._deepstack_process = method

    def check_model(
        self, build_pattern: Callable[[np.ndarray], Any], engine: EngineTrial | None
    ) -> None:
        """Raise FamilyError unless the parts compute the same logits as the whole model."""
        path = self.family.path
        with refuse_errors(path, UNSUPPORTED, f"{path}: the weights trial failed: "):
            own_attention = self.use_own_attention
            WeightsTrial(self, self.family, own_attention, build_pattern, engine).run()


def _join_patches(
    patches: Float[Tensor, "patches channels patch patch"], grids: list[Grid]
) -> Float[Tensor, "images channels height width"]:
    """Join patches to images, and pad them to the largest sides as the processor does."""
    counts = [rows * columns for _, rows, columns in grids]
    images = [join_patches(p, g) for p, g in zip(patches.split(counts), grids, strict=True)]
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    return torch.stack([F.pad(i, (0, width - i.shape[2], 0, height - i.shape[1])) for i in images])


def load(
    path: Path, family: AnyVLMFamily, device: torch.device, dtype: torch.dtype, attention: str
) -> AnyVLMForward:
    auto = AutoModelForImageTextToText if family.shows_media else AutoModelForCausalLM
    return AnyVLMForward(load_model(auto, path, device, dtype, "sdpa"), family, attention)
