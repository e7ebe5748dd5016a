"""The torch half of the generic family, which calls the parts of a transformers model separately.

`get_image_features` computes the features that replace embeddings of the text model. The text model
uses our attention patterns. If its layers do more than causal attention, it uses its own attention
over padded rows. After the weights are loaded, `check_model` compares the logits of the parts with
those of the whole model: for one sequence, for a pack and for a tree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import UNSUPPORTED
from sightline.families.anyvlm.processor import (
    FOREIGN,
    apply_template,
    load_processor,
    to_template_parts,
    uses_torchvision,
)
from sightline.families.anyvlm.render import AnyVLMRenderer
from sightline.families.anyvlm.vision import AnyVLMFamily, join_patches
from sightline.families.protocol import Grid
from sightline.families.transformers_forward import (
    TextForward,
    join_images,
    join_layers,
    load_model,
)
from sightline.media import MediaRef
from sightline.message import Message, assistant, user
from sightline.render import Rendered

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The allowed difference from the model's own logits, relative to the largest logit, by dtype."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""The names of the argument that marks image tokens."""


def find_text(model: Any) -> Any:
    """Return the module with the decoder's `layers`, or None."""
    text = model.get_decoder()
    while text is not None and not hasattr(text, "layers"):
        text = getattr(text, "model", None)
    return text


class AnyVLMForward(TextForward):
    def __init__(self, model: Any, family: AnyVLMFamily, attention: str) -> None:
        text = find_text(model)
        if text is None or model.get_output_embeddings() is None:
            raise FamilyError(
                f"{type(model).__name__} has no decoder with layers, or no output head",
                UNSUPPORTED,
            )
        super().__init__(model, text)
        self._family = family
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

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid]:
        image = Image.new("RGB", (32, 32), (90, 120, 150))
        item = self._family.item(MediaRef("0" * 64, "image/png", 32, 32, 1))
        return torch.from_numpy(self._family.patches(image, item)), item.grid

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        findings = self._family.findings
        if findings.rule == "lines" and len(patches) == findings.merge**2:
            # transformers squeezes the axis of a single token.
            return self.encode(patches.repeat(2, 1), grids * 2)[:1]
        arrays = self.read_arrays(patches, grids)
        model: Any = self.model
        output = model.get_image_features(**arrays, return_dict=True)
        features = output.pooler_output
        if features is None:  # the model projects the tower's output itself
            features = model.multi_modal_projector(output.last_hidden_state)
        return join_layers(join_images(features), output)

    def read_arrays(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> dict[str, Tensor]:
        """Return the arrays that the checkpoint's processor computed for these images, by name."""
        findings = self._family.findings
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
        along_axes = positions[:, 0, index]
        out = base(
            inputs_embeds=embeds[index],
            attention_mask=is_real.long(),
            position_ids=along_axes if len(positions) > 1 else along_axes[0],
            use_cache=False,
            **kinds,
        )
        hidden: Tensor = out.last_hidden_state[is_real]
        return hidden[None]

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        logits = super().logits(hidden)
        cap = getattr(self._text.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def check_model(self, build_pattern: Callable[[np.ndarray], Any]) -> None:
        """Raise FamilyError unless the parts compute the same logits as the whole model.

        `build_pattern` returns the attention pattern for a `subtree_end`.
        """
        messages, images = _draw_conversation()
        renderer = AnyVLMRenderer.load(self._family.path, self._family)
        rendered = renderer.render_read(messages, None, True)
        reference = self._run_model(rendered.token_ids, images, messages)
        items = [slot.item for slot in rendered.slots]
        patches = np.concatenate(
            [self._family.patches(i, item) for i, item in zip(images, items, strict=True)]
        )
        device = next(self.model.parameters()).device
        features = self.encode(torch.from_numpy(patches).to(device), [item.grid for item in items])
        length = len(rendered.token_ids)
        fork = rendered.slots[-1].end
        tail = length - fork
        tried = {
            # One sequence, two copies in one row, and a tree whose two branches are equal.
            "alone": (np.arange(length), [length] * length),
            "packed": (
                np.tile(np.arange(length), 2),
                [length] * length + [2 * length] * length,
            ),
            "a tree": (
                np.concatenate([np.arange(length), np.arange(fork, length)]),
                [length + tail] * fork + [length] * tail + [length + tail] * tail,
            ),
        }
        if self._attends_itself:
            del tried["a tree"]
        scale = float(reference.abs().max())
        for kind, (tokens, ends) in tried.items():
            logits = self._run_parts(rendered, features, tokens, build_pattern(np.array(ends)))
            difference = float((logits - reference[tokens]).abs().max()) / scale
            if not difference <= TOLERANCES[reference.dtype]:
                raise FamilyError(
                    f"{self._family.path}: the weights trial failed: computed {kind}, logits "
                    f"differ from {type(self.model).__name__}'s own by {difference:.2g} of the "
                    "largest logit, so its layers do more than causal attention",
                    UNSUPPORTED,
                )

    def _run_model(
        self, token_ids: list[int], images: list[Image.Image], messages: list[Message]
    ) -> Tensor:
        """Return the whole model's logits for the inputs from its own processor."""
        processor = load_processor(self._family.path)
        talk = [{"role": m.role, "content": to_template_parts(m, images)} for m in messages]
        inputs = apply_template(
            processor,
            talk,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            return_tensors="pt" if uses_torchvision(processor) else "np",
        )
        if inputs["input_ids"][0].tolist() != token_ids:
            raise FamilyError(
                f"{self._family.path}: the weights trial failed: the processor writes other tokens "
                "than it did for the probe",
                "install the same transformers in every environment of the run",
            )
        parameter = next(self.model.parameters())
        arrays = {name: torch.as_tensor(array) for name, array in inputs.items()}
        arguments = {
            name: (a.to(parameter.dtype) if a.is_floating_point() else a).to(parameter.device)
            for name, a in arrays.items()
        }
        self._set_attention("eager")
        ours = vars(self._text).pop("_deepstack_process", None)  # use the model's own method
        try:
            logits: Tensor = self.model(**arguments, use_cache=False).logits[0]
        except FOREIGN as error:
            raise FamilyError(
                f"{self._family.path}: the weights trial failed: the model's own forward pass "
                f"raised {type(error).__name__}: {error}",
                UNSUPPORTED,
            ) from error
        finally:
            self._set_attention(self._attention)
            if ours is not None:
                self._text._deepstack_process = ours
        return logits

    def _run_parts(
        self, rendered: Rendered, features: Tensor, tokens: np.ndarray, pattern: Any
    ) -> Tensor:
        """Return the logits of `tokens`, indices into the prompt, as one row with `pattern`."""
        device, slots = features.device, rendered.slots
        along, _ = self._family.positions(len(rendered.token_ids), slots)
        pads = np.concatenate([s.offset + self._family.feature_offsets(s.item) for s in slots])
        places = np.flatnonzero(np.isin(tokens, pads))
        which = np.searchsorted(pads, tokens[places])
        hidden = self.hidden(
            torch.tensor(rendered.token_ids, device=device)[torch.from_numpy(tokens).to(device)][
                None
            ],
            torch.from_numpy(along[:, tokens].astype(np.int64)).to(device)[:, None],
            features[torch.from_numpy(which).to(device)],
            torch.from_numpy(places).to(device),
            pattern,
        )
        return self.logits(hidden[0])


def _join_patches(
    patches: Float[Tensor, "patches channels patch patch"], grids: list[Grid]
) -> Float[Tensor, "images channels height width"]:
    """Join patches to images, and pad them to the largest sides as the processor does."""
    counts = [rows * columns for _, rows, columns in grids]
    images = [join_patches(p, g) for p, g in zip(patches.split(counts), grids, strict=True)]
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    return torch.stack([F.pad(i, (0, width - i.shape[2], 0, height - i.shape[1])) for i in images])


def _draw_conversation() -> tuple[list[Message], list[Image.Image]]:
    images = []
    for seed, (width, height) in enumerate(((64, 40), (50, 90))):
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        images.append(Image.fromarray(noise))
    first, two = (MediaRef(f"{i}" * 64, "image/png", *im.size, 1) for i, im in enumerate(images))
    return [user("look", first), assistant("yes"), user(two, "and this?")], images


def load(
    path: Path, family: AnyVLMFamily, device: torch.device, dtype: torch.dtype, attention: str
) -> AnyVLMForward:
    model = load_model(AutoModelForImageTextToText, path, device, dtype, "sdpa")
    return AnyVLMForward(model, family, attention)
