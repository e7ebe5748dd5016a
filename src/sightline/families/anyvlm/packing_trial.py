"""Whether sequences may share a row, found by trying layers of the model's own code.

Layers with random weights, one of each kind, compute two sequences with an image each: alone, side
by side as padded rows by the model's own attention, packed into one row in which a token attends
to what is before in its sequence, and as a tree. No weight of the checkpoint is read. Windows and
chunks are shortened, so that sequences are longer than what a layer reaches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import Findings
from sightline.families.anyvlm.forward import AnyVLMForward
from sightline.families.anyvlm.model_parts import REACHES, describe_layers, find_text
from sightline.families.anyvlm.processor import FOREIGN, UNSUPPORTED
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.transformers_forward import fill_buffers

ATTENTION_NAME = "sightline_trial"
REACH = 8
"""Tokens that windows and chunks are shortened to."""
NUM_IDS = 64
"""Rows of embeddings, in place of the vocabulary's."""
MAX_PARAMETERS = 1_500_000_000
"""Of the layers that are tried; larger ones are tried where their weights are loaded."""
TOLERANCE = 1e-3
"""How far hidden states may be from those of a sequence alone, of their largest."""

_SAME = "packed and as a tree its layers compute what they do of each sequence alone"
_LATER = "and its weights are tried when they are loaded"


@dataclass(frozen=True)
class PackingTrial:
    rows_reason: str = ""
    """Why sequences are padded rows; empty where they may share one."""
    trees_reason: str = ""
    """Why they may, where they do."""
    sees_ahead: bool = False
    """Whether a token of an image sees those of the image that are behind it."""


@dataclass(frozen=True)
class TriedPattern:
    """What may see what in one row, by `subtree_end`."""

    subtree_end: np.ndarray
    state: Any = None

    @property
    def mask(self) -> Tensor:
        at = torch.arange(len(self.subtree_end))
        return (at[None] <= at[:, None]) & (at[:, None] < torch.from_numpy(self.subtree_end)[None])


def try_packing(path: Path, config: Any, findings: Findings) -> PackingTrial:
    """What was found about layers of the model, in words.

    Layers that cannot be tried are what the configuration says of them, until their weights are.
    """
    words, is_more = describe_layers(config)
    try:
        model = build_tried_model(config)
        difference = None if model is None else measure_difference(path, model, findings)
    except FOREIGN as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return PackingTrial(words, f"a trial of its layers fails ({said}), {_LATER}")
    if difference is None:
        return PackingTrial(words, f"its layers are too large for a trial of their own, {_LATER}")
    if difference > TOLERANCE:
        return PackingTrial(
            f"{words or 'its layers do more than attend to what is before'}: packed, their output "
            f"is {difference:.1g} of the largest away from that of each sequence alone",
            sees_ahead=finds_ahead(path, model, findings),
        )
    return PackingTrial(words if is_more else "", _SAME)


def build_tried_model(config: Any) -> Any:
    """The model with a layer of each kind, the text model alone with values; None for one whose
    layers are too large to be tried."""
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    for name in REACHES.values():
        if isinstance(getattr(text_config, name, None), int):
            setattr(text_config, name, min(getattr(text_config, name), REACH))
    for part in (config, text_config):  # none of these tokens is in the sequences
        names = [n for n in vars(part) if n.endswith(("token_id", "token_index"))]
        vars(part).update(dict.fromkeys(names, NUM_IDS - 1))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    text = find_text(model)
    if text is None:
        return None
    del text.layers[count_kinds(text) :]
    for module in text.modules():
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = NUM_IDS, None
            module.weight = nn.Parameter(module.weight[:NUM_IDS])
    if sum(parameter.numel() for parameter in text.parameters()) > MAX_PARAMETERS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in text.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(_draw(parameter.shape), False)
    fill_buffers(model)
    return model.eval()


def count_kinds(text: Any) -> int:
    """How many of the first layers hold one of each kind."""
    types = getattr(text.config, "layer_types", None) or [""] * len(text.layers)
    kinds = [
        (kind, tuple((name, part.shape) for name, part in layer.named_parameters()))
        for kind, layer in zip(types, text.layers, strict=True)
    ]
    return max(kinds.index(kind) for kind in kinds) + 1


def _draw(shape: torch.Size) -> Tensor:
    if len(shape) < 2:  # a norm's, or a bias
        return 1 + 0.1 * torch.randn(shape)
    return torch.randn(shape) * shape[-1] ** -0.5


@torch.no_grad()
def measure_difference(path: Path, model: Any, findings: Findings) -> float:
    """How far packed output is from that of each sequence alone, of the largest."""
    run = _TriedModel(model, findings).run
    rows = AnyVLMForward(model, _build_family(path, findings, "tried"), ATTENTION_NAME)
    alone = {name: run(rows, *one) for name, one in draw_sequences()}
    scale = max(float(found.abs().max()) for found in alone.values())
    first, second = alone["first"], alone["second"]
    layouts = list(draw_layouts())
    padded = run(rows, *layouts[0][:3])
    if not float((padded - torch.cat([first, second])).abs().max()) <= TOLERANCE * scale:
        raise FamilyError(
            "as padded rows its layers do not compute what they compute for each sequence alone",
            UNSUPPORTED,
        )
    packed = AnyVLMForward(model, _build_family(path, findings, ""), ATTENTION_NAME)
    differences = [
        float((run(packed, tokens, at, ends) - torch.cat([first, second[shared:]])).abs().max())
        for tokens, at, ends, shared in layouts
    ]
    return max(differences) / scale


@torch.no_grad()
def finds_ahead(path: Path, model: Any, findings: Findings) -> bool:
    """Whether another last token of an image changes what the model computes of those before."""
    tried = _TriedModel(model, findings)
    rows = AnyVLMForward(model, _build_family(path, findings, "tried"), ATTENTION_NAME)
    _, (tokens, at, ends) = next(draw_sequences())
    last = int(np.flatnonzero(np.diff(_is_image(tokens).astype(int)) < 0)[0])
    before = tried.run(rows, tokens, at, ends)[:last]
    tried.features[tokens[last]] += 1
    difference = (tried.run(rows, tokens, at, ends)[:last] - before).abs().max()
    return float(difference) > TOLERANCE * float(before.abs().max())


class _TriedModel:
    """Runs tokens of two sequences whose ids, and features, are those of their numbers."""

    def __init__(self, model: Any, findings: Findings) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attend)
        draw = torch.Generator().manual_seed(0)
        width = find_text(model).config.hidden_size
        self.features = torch.randn(NUM_IDS, width, generator=draw)
        self._num_axes = findings.num_axes

    def run(self, forward: AnyVLMForward, tokens: np.ndarray, at: np.ndarray, ends: Any) -> Tensor:
        ids = torch.from_numpy(tokens)
        shown = torch.from_numpy(np.flatnonzero(_is_image(tokens)))
        along = torch.from_numpy(at).expand(self._num_axes, 1, len(at))
        pattern = TriedPattern(np.array(ends))
        return forward.hidden(ids[None], along, self.features[ids[shown]], shown, pattern)[0]


FORK = 26
"""Tokens that the two sequences have in common."""
LENGTHS = (40, 34)


def _number(which: int) -> np.ndarray:
    """A sequence as numbers of its tokens."""
    own = np.arange(FORK, LENGTHS[which]) + (LENGTHS[0] - FORK) * which
    return np.concatenate([np.arange(FORK), own])


def _is_image(tokens: np.ndarray) -> np.ndarray:
    """An image before the fork, and one behind it in each sequence."""
    return ((tokens >= 4) & (tokens < 18)) | ((tokens >= 28) & (tokens < 34)) | (tokens >= 42)


def draw_sequences() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray, list[int]]]]:
    for which, name in enumerate(("first", "second")):
        length = LENGTHS[which]
        yield name, (_number(which), np.arange(length), [length] * length)


def draw_layouts() -> Iterator[tuple[np.ndarray, np.ndarray, list[int], int]]:
    """Both sequences in one row, one behind the other and as a tree: tokens, their positions and
    ends, and how many of the second are not there twice."""
    one, two = LENGTHS
    both = np.concatenate([_number(0), _number(1)])
    yield both, np.concatenate([np.arange(one), np.arange(two)]), [one] * one + [one + two] * two, 0
    total = one + two - FORK
    tokens = np.concatenate([_number(0), _number(1)[FORK:]])
    at = np.concatenate([np.arange(one), np.arange(FORK, two)])
    yield tokens, at, [total] * FORK + [one] * (one - FORK) + [total] * (two - FORK), FORK


def _build_family(path: Path, findings: Findings, rows_reason: str) -> AnyVLMFamily:
    return AnyVLMFamily(path, msgspec.structs.replace(findings, rows_reason=rows_reason))


def _attend(
    module: Any,
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    value: Float[Tensor, "rows kv_heads keys value_width"],
    attention_mask: Any,
    scaling: float,
    pattern: TriedPattern,
    **options: Any,
) -> tuple[Tensor, None]:
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=pattern.mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None
