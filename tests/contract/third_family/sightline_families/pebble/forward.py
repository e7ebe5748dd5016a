"""The torch half: patches to features, tokens to hidden states.

Plain torch. A family whose model is in transformers would load it from there and call its parts.

Letters: N patches, B rows, T tokens, H hidden size, D head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from sightline.families.checkpoint_files import read_json

from .vision import Pebble


class Tower(nn.Module):
    """A patch's features depend only on its pixels and its position."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, places = config["hidden_size"], config["max_patches_per_side"]
        self.pixels = nn.Linear(3 * config["patch_size"] ** 2, hidden)
        self.row, self.column = nn.Embedding(places, hidden), nn.Embedding(places, hidden)
        self.out = nn.Sequential(nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        pixels = self.pixels(values) + self.row(place[:, 0]) + self.column(place[:, 1])
        features: torch.Tensor = self.out(pixels)
        return features


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.joined = nn.Linear(hidden, hidden, bias=False)
        self.wide = nn.Linear(hidden, 2 * hidden)
        self.narrow = nn.Linear(2 * hidden, hidden)

    def forward(
        self, x: torch.Tensor, turn: torch.Tensor, attention: Any, index: int
    ) -> torch.Tensor:
        split = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        q, k = _turned(q, turn), _turned(k, turn)
        attended = attention.attend(index, q, k, v, q.shape[-1] ** -0.5)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Model(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.tower = Tower(config)
        self.words = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, config["vocab_size"], bias=False)
        self.half = hidden // config["num_attention_heads"] // 2


class PebbleForward:
    def __init__(self, model: Model) -> None:
        self.model = model

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"tower.{name}", p) for name, p in self.model.tower.named_parameters()]

    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def blank_image(self) -> tuple[torch.Tensor, tuple[int, int, int]]:
        values = self.model.tower.pixels.in_features
        return torch.zeros(1, values, dtype=torch.uint8), (1, 1, 1)

    def read_arrays(
        self, patches: torch.Tensor, grids: list[tuple[int, int, int]]
    ) -> dict[str, torch.Tensor]:
        """Return the tower's inputs. A test compares them with the release's arrays."""
        values = (patches.float() / 255 - 0.5).to(self.model.head.weight.dtype)
        place = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in grids]
        places = torch.cat([p.view(-1, 2) for p in place])
        return {"values": values, "place": places.to(values.device)}

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        return self.model.tower(**self.read_arrays(patches, grids))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_indices: torch.Tensor | None,
        attention: Any,
    ) -> torch.Tensor:
        x = self.model.words(token_ids)
        if features is not None and feature_indices is not None and len(feature_indices):
            flat = x.flatten(0, 1).index_copy(0, feature_indices, features.to(x.dtype))
            x = flat.view(x.shape)
        turn = _turn(positions[0], self.model.half, x.dtype)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, turn, attention, index)
        hidden: torch.Tensor = self.model.norm(x)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.head(hidden)
        return logits


def _turn(positions: torch.Tensor, half: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine (2, B, 1, T, D/2) of the angles by which heads are turned."""
    speeds = 10_000.0 ** (-torch.arange(half, device=positions.device) / half)
    angles = positions[:, None, :, None] * speeds
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    (a, b), (cos, sin) = x.chunk(2, dim=-1), turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def load(
    path: Path, family: Pebble, device: torch.device, dtype: torch.dtype, attention: str
) -> PebbleForward:
    """`attention` is a name for transformers' models. This model calls the pattern itself."""
    model = Model(read_json(path / "config.json"))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return PebbleForward(model.to(device, dtype))
