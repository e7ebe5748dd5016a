"""Versions that are adapters, on every engine: results equal those of merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from serving import Client, Reference, live

from sightline.compute.lora_weights import digest_tensors
from sightline.compute.weights import write_weights
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import user
from sightline.wire import Slot
from sightline.wire.generate import GenerateResponse, SamplingParams
from sightline.wire.weights import Adapter, Manifest

RANK, SCALE = 4, 0.5
TEXT = ("q_proj.weight", "k_proj.weight", "gate_proj.weight", "down_proj.weight")
VISION = ("attn.qkv.weight", "mlp.linear_fc1.weight")
PARAMS = SamplingParams(max_tokens=12, seed=3, skip_reading_prefix_cache=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def fresh(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_model: Path, media: MediaStore) -> Reference:
    return Reference(tiny_model, media)


@pytest.fixture(scope="module")
def prompt(reference: Reference, media: MediaStore) -> tuple[list[int], list[Slot]]:
    ref = media.put(Image.new("RGB", (64, 96), (5, 120, 250)))
    rendered = reference.renderer.render([user("What is below?", ref)])
    return rendered.token_ids, rendered.slots


def made_up(
    reference: Reference, ends: tuple[str, ...], trains: str = "", seed: int = 0
) -> tuple[Tensors, Adapter, Tensors]:
    """Return an adapter for every matrix whose name ends so, its base, and the merged weights.

    A parameter whose name contains `trains` is trained fully.
    """
    rng = torch.Generator().manual_seed(seed)
    base = {name: p.detach() for name, p in reference.model.named_parameters()}
    tensors: Tensors = {}
    whole, scales = dict(base), {}
    for name, weight in base.items():
        if name.endswith(ends):
            a = torch.randn(RANK, weight.shape[1], generator=rng) * 0.1
            b = torch.randn(weight.shape[0], RANK, generator=rng) * 0.1
            tensors |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
            whole[name] = weight + SCALE * (b @ a)
            scales[name] = SCALE
        elif trains and trains in name:
            tensors[name] = whole[name] = weight * 1.1
    still = ((name, weight) for name, weight in base.items() if name not in tensors)
    return tensors, Adapter(digest_tensors(still, torch.float32), "F32", scales), whole


def said(answer: GenerateResponse) -> tuple[list[int], list[float]]:
    choice = answer.choices[0]
    assert choice.logprobs is not None
    return choice.token_ids, [entry.logprob for entry in choice.logprobs.content]


@pytest.mark.parametrize(
    ("ends", "trains", "sees"),
    [(TEXT, "", False), (TEXT + VISION, "", True), (TEXT, "visual.blocks", True)],
    ids=["text", "both", "tower whole"],
)
def test_adapter_serves_like_its_merged_weights(
    fresh: Client, reference: Reference, prompt: tuple[list[int], list[Slot]], tmp_path: Path,
    ends: tuple[str, ...], trains: str, sees: bool,
) -> None:  # fmt: skip
    before = said(fresh.generate(*prompt, PARAMS))
    encoded = fresh.totals().get("images_encoded", 0)
    tensors, adapter, whole = made_up(reference, ends, trains)
    path, small = write_weights(tmp_path, tensors, 3, 3 * sees, adapter=adapter)
    assert fresh.adopt(path) == {"version": "3", "vision_version": 3 * sees}
    ours = said(fresh.generate(*prompt, PARAMS))
    assert np.abs(np.array(ours[1]) - before[1]).max() > 1e-2, "the adapter says something"
    assert fresh.totals().get("images_encoded", 0) - encoded == (
        sees if "images_encoded" in fresh.totals() else 0
    ), "only a tower that changed looks again"
    second, _ = write_weights(tmp_path, *another(reference, ends, trains), adapter=adapter)
    fresh.adopt(second)
    assert said(fresh.generate(*prompt, PARAMS)) != ours
    path, large = write_weights(tmp_path, whole, 5, 5)
    fresh.adopt(path)
    merged = said(fresh.generate(*prompt, PARAMS))
    assert merged[0] == ours[0]
    np.testing.assert_allclose(merged[1], ours[1], atol=1e-4)
    if not trains:
        assert small.files[0].nbytes < large.files[0].nbytes / 3


def another(reference: Reference, ends: tuple[str, ...], trains: str) -> tuple[Tensors, int, int]:
    """Publish a later version. It is added to the base, not to the previous version."""
    return made_up(reference, ends, trains, seed=1)[0], 4, 4


@pytest.mark.parametrize("fault", ["base", "shape", "stranger", "half", "torn", "scale"])
def test_mismatched_adapter_is_refused_and_weights_are_kept(
    fresh: Client, reference: Reference, prompt: tuple[list[int], list[Slot]], tmp_path: Path,
    fault: str,
) -> None:  # fmt: skip
    tensors, adapter, _ = made_up(reference, TEXT)
    name = next(name for name in tensors if name.endswith("q_proj.weight.lora_A"))
    if fault == "base":
        adapter = msgspec.structs.replace(adapter, base="0" * 64)
    if fault == "shape":
        tensors[name] = tensors[name][:, 1:]
    if fault == "stranger":
        tensors["model.stranger.weight"] = torch.zeros(2)
    if fault == "half":
        del tensors[name]
    path, _ = write_weights(tmp_path, tensors, 9, 0, adapter=adapter)
    file = path.with_name("adapter.safetensors")
    if fault == "torn":
        file.write_bytes(file.read_bytes()[:-8])
    if fault == "scale":  # of a layer that is not there
        values = msgspec.json.decode(path.read_bytes(), type=Manifest)
        scales = adapter.scales | {"model.language_model.norm.weight": 1.0}
        changed = msgspec.structs.replace(adapter, scales=scales)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(values, adapter=changed)))
    before = fresh.generate(*prompt, PARAMS)
    error = fresh.refused(json.dumps({"manifest": str(path)}).encode(), "/sightline/v1/adopt")
    assert (error.code, error.type) == (422, "weights")
    if fault == "base":
        assert "a different base" in error.message
    assert fresh.get("/health")["version"] == "0"
    assert fresh.generate(*prompt, PARAMS).choices == before.choices
