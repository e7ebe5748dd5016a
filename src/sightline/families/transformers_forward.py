"""The torch half of families whose model is in transformers.

The parts of a transformers model are called separately. This places images by slots, while the
model's own forward pass searches for pad ids. It also encodes each distinct image only once. Values
that depend on image sizes are computed on the host, because reading them from the device blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, vision_utils

from sightline.errors import FamilyError, SightlineError
from sightline.families.checkpoint_files import first_line, hide_pad_warning, read_json, read_shapes
from sightline.families.device_copy import copy_to_device, move_to_device
from sightline.families.experts import ExpertRouting, check_auxiliary_loss, group_experts
from sightline.families.gated_delta_net import build_recurrence_plan, pack_delta_nets
from sightline.families.protocol import Grid
from sightline.families.rope import pin_frequencies
from sightline.regular_file import check_file

REWARD_HEAD = "score.weight"


class TextForward:
    def __init__(self, model: Any, text: Any) -> None:
        self.model: nn.Module = model
        self._text = text
        self._head: Any = model.get_output_embeddings()
        self._recurrent_window = pack_delta_nets(text)
        self.routing = ExpertRouting.find(text)
        if hasattr(text, "_deepstack_process"):
            # Features of inner layers are passed with indices instead of a mask.
            text._deepstack_process = _add_deepstack_features

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def blocks(self) -> list[nn.Module]:
        return list(self._text.layers)

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid] | None:
        return None

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")

    def hidden(
        self,
        token_ids: Int[Tensor, "rows length"],
        positions: Int[Tensor, "axes rows length"],
        features: Float[Tensor, "visual_tokens features"] | None,
        feature_indices: Int[Tensor, " visual_tokens"] | None,
        attention: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        embeds = self._text.embed_tokens(token_ids)
        options = {"past_key_values": attention.state, "use_cache": False, "pattern": attention}
        if features is not None and feature_indices is not None and len(feature_indices):
            size = embeds.shape[-1]
            layers = features.to(embeds.dtype).split(size, dim=-1)
            flat = embeds.reshape(-1, size).index_copy(0, feature_indices, layers[0])
            embeds = flat.view(embeds.shape)
            if len(layers) > 1:
                options["visual_pos_masks"] = feature_indices
                options["deepstack_visual_embeds"] = list(layers[1:])
        if (window := self._recurrent_window) and attention.state is None:
            plan = build_recurrence_plan(attention.subtree_end, window, embeds.device)
            options["recurrence"] = plan
        along_axes = positions if len(positions) > 1 else positions[0]
        out = self._text(inputs_embeds=embeds, position_ids=along_axes, **options)
        return out.last_hidden_state

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        return self._head(hidden)


class VisionForward(TextForward):
    """A model with a vision tower. By default, the tower processes several frames at once."""

    vision_parts: ClassVar[tuple[str, ...]] = ("visual",)
    """The modules that compute image features, the tower first."""

    def __init__(self, model: nn.Module, family: Any) -> None:
        body: Any = model.model
        super().__init__(model, body.language_model)
        self._family = family
        self._parts = {f"model.{name}": getattr(body, name) for name in self.vision_parts}
        self._tower: Any = getattr(body, self.vision_parts[0])
        self._table = torch.from_numpy(family.table.copy())
        self._tower_inputs = lru_cache(maxsize=16)(self.compute_tower_inputs)

    @classmethod
    def load(
        cls, path: Path, family: Any, device: torch.device, dtype: torch.dtype, attention: str
    ) -> Self:
        """Load a family's model. Its `forward.py` offers this as `load`."""
        model = load_model(AutoModelForImageTextToText, path, device, dtype, attention)
        return cls(model, family)

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{part}.{name}", parameter)
            for part, module in self._parts.items()
            for name, parameter in module.named_parameters()
        ]

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), *self._tower.blocks]

    def compute_tower_inputs(self, grids: tuple[Grid, ...]) -> dict[str, Any]:
        """Return the keyword arguments that the tower would otherwise derive from `grid_thw`.

        They are arrays, because tensors created without gradients cannot be used with gradients.
        """
        sizes = torch.tensor(grids)
        merge = self._tower.spatial_merge_size
        ends = vision_utils.get_vision_cu_seqlens(sizes)
        return {
            "position_ids": vision_utils.get_vision_position_ids(sizes, merge).numpy(),
            "cu_seqlens": ends.numpy(),
            "max_seqlen": int(ends.diff().max()),
        }

    def rows(self, patches: UInt8[Tensor, "patches values"]) -> Float[Tensor, "patches ..."]:
        """Return the normalized values of patches in the tower's input shape.

        The single frame of an image is repeated. A video step has all frames.
        """
        values = self.look_up(patches)
        num, _, size = values.shape
        if size != self._family.patch**2:
            return values.reshape(num, -1)
        return values.unsqueeze(2).expand(num, 3, self._family.temporal, size).reshape(num, -1)

    def get_features(self, output: Any) -> Float[Tensor, "visual_tokens features"]:
        """Return the features in the tower's output."""
        return join_layers(output.pooler_output, output)

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid] | None:
        side, values = self._family.merge, 3 * self._family.patch**2
        return torch.zeros(side * side, values, dtype=torch.uint8), (1, side, side)

    def look_up(
        self, patches: UInt8[Tensor, "patches values"]
    ) -> Float[Tensor, "patches channels=3 pixels"]:
        """Look up the normalized values of patches in a table with one column per channel.

        Computing them would round differently on other devices.
        """
        by_channel = patches.view(patches.shape[0], 3, -1).long()
        channel = torch.arange(3, device=patches.device).view(1, 3, 1)
        self._table = self._table.to(patches.device)  # copied once
        return self._table[by_channel, channel]

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        rows = self.rows(patches).to(next(self._tower.parameters()).dtype)
        inputs = {"grid_thw": torch.tensor(grids)}  # on the host by default
        for name, value in self._tower_inputs(tuple(grids)).items():
            is_array = isinstance(value, np.ndarray)
            inputs[name] = copy_to_device(value, rows.device) if is_array else value
        return self.get_features(self._tower(rows, **inputs))


def join_layers(
    features: Float[Tensor, "visual_tokens hidden"], output: Any
) -> Float[Tensor, "visual_tokens features"]:
    """Append the features of the tower's inner layers, which some text models also use."""
    deeper = getattr(output, "deepstack_features", None) or []
    return torch.cat([features, *map(join_images, deeper)], dim=-1)


def join_images(features: Any) -> Float[Tensor, "visual_tokens hidden"]:
    """Return features with one row per token, from one tensor or one tensor per image."""
    if isinstance(features, list | tuple):
        return torch.cat([image.flatten(0, -2) for image in features])
    return features.flatten(0, -2)


def _add_deepstack_features(
    hidden: Float[Tensor, "rows length hidden"],
    places: Int[Tensor, " visual_tokens"],
    features: Float[Tensor, "visual_tokens hidden"],
) -> Float[Tensor, "rows length hidden"]:
    """Add `features` to `hidden` at `places`, which index the tokens of all rows."""
    features = features.to(hidden.dtype)
    if len(hidden) == 1:  # avoids a view, which would make a compiler build more graphs
        return hidden.index_add(1, places, features[None])
    return hidden.flatten(0, 1).index_add(0, places, features).view(hidden.shape)


@contextmanager
def refuse_errors(path: Path, fix: str, where: str = "") -> Iterator[None]:
    """Turn an error of transformers' code into a refusal that names the type and the cause."""
    try:
        yield
    except (SightlineError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of transformers and of templates may raise anything
        kind = read_json(path / "config.json").get("model_type")
        problem = f"stopped with {type(error).__name__}: {first_line(error)}"
        if isinstance(error, ImportError):
            problem = f"needs a package that is not installed: {first_line(error).split('. ')[0]}"
            fix = "install the package in the environments of the server and of the trainer"
        where += f"the code of transformers for the type {kind!r} "
        raise FamilyError(where + problem, fix) from error


def load_model(
    auto: Any, path: Path, device: torch.device, dtype: torch.dtype, attention: str
) -> Any:
    """Load the model of a checkpoint folder, with the attention registered as `attention`.

    On the meta device, parameters have no values. They are read when the model is sharded.
    """
    hide_pad_warning()
    read_shapes(path)  # refuses quantized weights
    fix = "copy config.json and all *.safetensors files again from the same checkpoint"
    if device.type == "meta":
        with refuse_errors(path, fix, f"{path}: the model cannot be built: "):
            model = _build_empty(auto, path, dtype)
    else:
        with refuse_errors(path, fix, f"{path}: the weights cannot be loaded: "):
            model, loaded = auto.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below
            )
        # transformers gives these parameters random values, which differ between processes.
        reshaped = {name for name, *_ in loaded["mismatched_keys"]}
        missing_keys = loaded["missing_keys"]
        if REWARD_HEAD in loaded["unexpected_keys"]:
            _add_reward_head(model, path)
            missing_keys = missing_keys - {"lm_head.weight"}  # a reward model has none
        if missing := sorted(missing_keys | reshaped):
            raise FamilyError(
                f"{path}: {len(missing)} parameters have no weights, or weights of a different "
                f"shape, such as {missing[0]!r}",
                fix,
            )
        move_to_device(model, device)
    pin_frequencies(model)
    check_auxiliary_loss(model.config.get_text_config())
    group_experts(model)
    # Set after loading, because transformers treats a name with "flash" as a package.
    model.config._attn_implementation = attention
    return model


def _add_reward_head(model: Any, path: Path) -> None:
    """Read the head of a sequence classification checkpoint with one label into `model.score`."""
    files = sorted(path.glob("*.safetensors"))
    opened = [safe_open(check_file(file), framework="pt") for file in files]
    weight = next(file.get_tensor(REWARD_HEAD) for file in opened if REWARD_HEAD in file.keys())
    width = model.config.get_text_config().hidden_size
    if weight.shape != (1, width):
        raise FamilyError(
            f"{path}: {REWARD_HEAD} has the shape {[*weight.shape]}, but a reward has [1, {width}]",
            "use a classification checkpoint with one label",
        )
    model.score = nn.Linear(width, 1, bias=False)
    model.score.weight = nn.Parameter(weight.to(model.dtype))


def _build_empty(auto: Any, path: Path, dtype: torch.dtype) -> Any:
    """Build the model with parameters on the meta device and the buffers of `from_pretrained`."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    for part in model._get_dtype_plan(dtype):  # kept in float32
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if part in name:
                tensor.data = tensor.data.float()
    fill_buffers(model)
    return model


def fill_buffers(model: Any) -> None:
    """Compute the buffers of a model on the meta device. Parameters do not change."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
