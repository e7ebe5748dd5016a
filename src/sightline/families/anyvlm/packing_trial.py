"""The packing trial, which tests whether sequences may share a row.

The trial builds one layer of each kind from the model's code, with random weights. It runs two
sequences (with images, if the model accepts them) in five ways: each alone, as padded rows with the
model's own attention, packed into one row with causal attention, as a tree, and decoded with a KV
cache. A third sequence is much longer than the others. The trial does not read the checkpoint's
weights. It shortens windows and chunks so that the sequences exceed them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import UNSUPPORTED, Findings
from sightline.families.anyvlm.forward import AnyVLMForward, find_auto_class, find_text
from sightline.families.anyvlm.processor import FOREIGN
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.checkpoint_files import first_line
from sightline.families.rope import pin_frequencies
from sightline.families.transformers_forward import fill_buffers

ATTENTION_NAME = "sightline_trial"
REACHES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer kinds with limited attention range, and the setting for that range."""
REACH = 8
"""The length to which windows and chunks are shortened."""
NUM_IDS = 64
"""The number of embeddings, instead of the whole vocabulary."""
FORK = 26
"""The number of tokens that the first two sequences share."""
LONG = 256
NUM_DECODED = 4
"""The number of tokens that are decoded one by one."""
MAX_PARAMETERS = 1_500_000_000
"""The maximum size of the trial's layers. Larger ones are tested when weights are loaded."""
TOLERANCE = 1e-3
"""The allowed difference of hidden states, relative to the largest value."""

_SAME = (
    "packed, as a tree and decoded with a KV cache, its layers compute the same as for each "
    "sequence alone"
)
_LATER = "and its weights will be tested when they are loaded"


@dataclass(frozen=True)
class TriedPattern:
    """The attention pattern of one row, defined by `subtree_end`."""

    subtree_end: np.ndarray
    state: Any = None

    @property
    def mask(self) -> Tensor:
        at = torch.arange(len(self.subtree_end))
        return (at[None] <= at[:, None]) & (at[:, None] < torch.from_numpy(self.subtree_end)[None])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, scale=scaling, enable_gqa=True)


class TriedCache:
    """The pattern of one sequence's next tokens. Like an engine, it has one cache for a layer."""

    state = None

    def __init__(self) -> None:
        self._cached: dict[int, list[Tensor]] = {}
        self.start = 0
        """The number of tokens before this pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        cached = self._cached.get(layer, [k[:, :, :0], v[:, :, :0]])
        pairs = zip(cached, (k, v), strict=True)
        joined = (torch.cat([old[:, :, : self.start], new], dim=2) for old, new in pairs)
        k, v = self._cached[layer] = list(joined)
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(self.start)
        return F.scaled_dot_product_attention(q, k, v, sees, scale=scaling, enable_gqa=True)


def try_packing(path: Path, config: Any, findings: Findings) -> tuple[str, str]:
    """Test the model's layers. If the trial cannot run, decide by the configuration.

    Return why sequences need padded rows, or "", and why they may share a row otherwise.
    """
    description, is_more = describe_layers(config)
    try:
        model = build_tried_model(config)
        difference = None if model is None else find_difference(path, model, findings)
    except FOREIGN as error:
        return description, f"a trial of its layers fails ({first_line(error)}), {_LATER}"
    if difference is None:
        return description, f"its layers are too large for a trial of their own, {_LATER}"
    if difference:
        return f"{description or 'its layers are more than causal attention'}: {difference}", ""
    return description if is_more else "", _SAME


def describe_layers(config: Any) -> tuple[str, bool]:
    """Describe the layers that do more than causal attention, according to the configuration.

    Also return whether a trial cannot detect them: layers with a state or an unknown range.
    """
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    has_window = getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None)
    if not types and has_window:
        types = ["sliding_attention"]
    kinds = sorted(set(types) - {"full_attention"})
    is_unseen = any(getattr(text, REACHES.get(kind, ""), None) is None for kind in kinds)
    return f"layers of this model are of {' and '.join(kinds)}" if kinds else "", is_unseen


def build_tried_model(config: Any) -> Any:
    """Build the model with one layer of each kind. Only the text model gets values.

    Return None if it has no text model with layers, or if they are too large.
    """
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    for name in REACHES.values():
        if isinstance(getattr(text_config, name, None), int):
            setattr(text_config, name, min(getattr(text_config, name), REACH))
    for part in (config, text_config):  # the sequences contain none of these tokens
        names = [n for n in vars(part) if n.endswith(("token_id", "token_index"))]
        vars(part).update(dict.fromkeys(names, NUM_IDS - 1))
    with torch.device("meta"):
        model = find_auto_class(config).from_config(config, dtype=torch.float32)
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
    pin_frequencies(model)
    return model.eval()


def count_kinds(text: Any) -> int:
    """Return the number of leading layers that include every kind."""
    types = getattr(text.config, "layer_types", None) or [""] * len(text.layers)
    kinds = [
        (kind, tuple((name, part.shape) for name, part in layer.named_parameters()))
        for kind, layer in zip(types, text.layers, strict=True)
    ]
    return max(kinds.index(kind) for kind in kinds) + 1


def _draw(shape: torch.Size) -> Tensor:
    if len(shape) < 2:  # a norm or a bias
        return 1 + 0.1 * torch.randn(shape)
    return torch.randn(shape) * shape[-1] ** -0.5


@torch.no_grad()
def find_difference(path: Path, model: Any, findings: Findings) -> str:
    """Describe the first computation whose output differs from that of separate sequences.

    Token ids also index the features. The first two sequences share the first `FORK` tokens.
    """
    AttentionInterface.register(ATTENTION_NAME, _attend)
    width = find_text(model).config.hidden_size
    features = torch.randn(NUM_IDS, width, generator=torch.Generator().manual_seed(0))

    def run(rows_reason: str, tokens: np.ndarray, at: np.ndarray, pattern: Any) -> Tensor:
        family = AnyVLMFamily(path, msgspec.structs.replace(findings, rows_reason=rows_reason))
        forward = AnyVLMForward(model, family, ATTENTION_NAME)
        ids = torch.from_numpy(tokens)
        # One image before the fork, and one after it in each sequence.
        is_image = (ids >= 4) & (ids < 18) | (ids >= 28) & (ids < 34) | (ids >= 42)
        is_image &= family.shows_media
        places = is_image.nonzero()[:, 0]
        along = torch.from_numpy(at).expand(findings.num_axes, 1, len(at))
        return forward.hidden(ids[None], along, features[ids[places]], places, pattern)[0]

    def run_pack(rows_reason: str, tokens: np.ndarray, at: np.ndarray, ends: list[int]) -> Tensor:
        return run(rows_reason, tokens, at, TriedPattern(np.array(ends)))

    first = np.arange(40)
    second = np.concatenate([np.arange(FORK), np.arange(40, 48)])
    sequences = [first, second, np.arange(LONG) % len(first), np.arange(3)]
    at = [np.arange(len(sequence)) for sequence in sequences]
    alone = [run_pack("tried", s, a, [len(s)] * len(s)) for s, a in zip(sequences, at, strict=True)]
    together = torch.cat(alone)
    scale = float(together.abs().max())
    lengths = [len(sequence) for sequence in sequences]
    ends = np.repeat(np.cumsum(lengths), lengths).tolist()
    pack = (np.concatenate(sequences), np.concatenate(at), ends)
    one, two, total = len(first), len(second), len(first) + len(second) - FORK
    tree = (
        np.concatenate([first, second[FORK:]]),
        np.concatenate([np.arange(one), np.arange(FORK, two)]),
        [total] * FORK + [one] * (one - FORK) + [total] * (two - FORK),
    )
    if not float((run_pack("tried", *pack) - together).abs().max()) <= TOLERANCE * scale:
        raise FamilyError(
            "as padded rows its layers do not compute what they compute for each sequence alone",
            UNSUPPORTED,
        )
    cache, decoded = TriedCache(), []
    for start, end in pairwise([0, one // 2, *range(one - NUM_DECODED, one + 1)]):
        cache.start = start
        decoded.append(run("", first[start:end], at[0][start:end], cache))
    outputs = {
        "packed": (run_pack("", *pack), together),
        "as a tree": (run_pack("", *tree), torch.cat([alone[0], alone[1][FORK:]])),
        "decoded with a KV cache": (torch.cat(decoded), alone[0]),
    }
    for kind, (output, reference) in outputs.items():
        difference = float((output - reference).abs().max()) / scale
        if not difference <= TOLERANCE:
            return (
                f"{kind}, their output differs from that of each sequence alone by "
                f"{difference:.1g} of the largest value"
            )
    return ""


def _attend(
    module: Any,
    query: Float[Tensor, "rows heads queries width"],
    key: Float[Tensor, "rows kv_heads keys width"],
    value: Float[Tensor, "rows kv_heads keys value_width"],
    attention_mask: Any,
    scaling: float,
    pattern: TriedPattern | TriedCache,
    **options: Any,
) -> tuple[Tensor, None]:
    out = pattern.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2), None
