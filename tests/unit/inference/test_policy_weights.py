"""Adapters in the embedded engine: unmerged, with the trainer's logprobs bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from unit.trainer.test_lora import BOTH, TEXT, batch_of, describe

from sightline.compute.fused_layers import _join
from sightline.compute.model import MODEL_DTYPES, load_model
from sightline.config import LoraConfig
from sightline.errors import WeightsError
from sightline.families import Forward, load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.torch_engine.policy_weights import PolicyWeights
from sightline.media import MediaStore
from sightline.message import user
from sightline.trainer.learner import Learner
from sightline.wire.weights import Adapter, Manifest
from tests.read_back import read_weights

Version = tuple[Manifest, dict[str, torch.Tensor]]


def build_learner(model: Path, store: MediaStore, dtype: str, **lora: Any) -> Learner:
    config = making.trainer_config(lr=2e-2, master_dtype="model")
    settings = making.model_config(model, dtype=dtype)
    return making.build_learner(settings, config, store, 10, lora=LoraConfig(**lora), seed=3)


def train(learner: Learner, model: Path, store: MediaStore) -> None:
    for _ in range(2):
        learner.step(batch_of(learner, model, store))


def publish(learner: Learner, folder: Path, dtype: str, unmerged: bool = True) -> Version:
    model, kind = learner.forward.model, MODEL_DTYPES[dtype]
    adapter = describe(model, kind) if unmerged else None
    return read_weights(making.publish(model, folder, 2, kind, adapter)[0])


def open_served(model: Path, dtype: str) -> tuple[Forward, PolicyWeights]:
    forward, again = (load_model(model, load_family(model), "cpu", dtype) for _ in "ab")
    return forward, PolicyWeights(forward.model, lambda: dict(again.model.named_parameters()))


def adopt(weights: PolicyWeights, version: Version) -> bool:
    adapter, tensors = version[0].adapter, version[1]
    return weights.adopt(adapter, weights.check(adapter, tensors))


def read_logprobs(learner: Learner, model: Path, store: MediaStore) -> np.ndarray:
    ref = store.put(making.Image.new("RGB", (64, 96), (5, 120, 250)))
    rendered = load_renderer(model, store).render([user("What is below?", ref)])
    return making.trainer_logprobs(learner, store, rendered, [5, 9, 17, 33, 12, 40])


@pytest.mark.parametrize("lora", [BOTH, TEXT], ids=["adapters", "tower whole"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unmerged_adapters_have_the_trainers_logprobs_bit_for_bit(
    store: MediaStore, tmp_path: Path, dtype: str, lora: dict[str, Any]
) -> None:
    model = tmp_path / "tiny"
    write_tiny("qwen_vl", model, seed=0, dtype=dtype)
    learner = build_learner(model, store, dtype, **lora)
    served, weights = open_served(model, dtype)
    before = {name: p.detach().clone() for name, p in served.model.named_parameters()}
    first = read_logprobs(learner, model, store)
    train(learner, model, store)
    version = publish(learner, tmp_path / "adapter", dtype)
    assert adopt(weights, version)
    trainers = read_logprobs(learner, model, store)
    ours = read_logprobs(replace(learner, forward=served), model, store)
    assert np.array_equal(ours, trainers) and np.abs(trainers - first).max() > 1e-2
    for name, parameter in served.model.named_parameters():
        assert name in version[1] or parameter.equal(before[name]), "the base is not changed"

    merged, whole = open_served(model, dtype)
    adopt(whole, publish(learner, tmp_path / "merged", dtype, unmerged=False))
    rounded = read_logprobs(replace(learner, forward=merged), model, store)
    print(f"\n{dtype}: max error of logprobs {np.abs(rounded - trainers).max():.1e} merged, 0 not")
    assert np.abs(rounded - trainers).max() < (1e-4 if dtype == "float32" else 0.2)


def test_versions_replace_each_other_in_any_form(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    """After whole weights, an adapter needs the base again, which is read from the checkpoint."""
    learner = build_learner(tiny_model, store, "float32", **BOTH)
    versions, logprobs = [], []
    for number in range(2):
        train(learner, tiny_model, store)
        versions.append(publish(learner, tmp_path / f"{number}", "float32"))
        logprobs.append(read_logprobs(learner, tiny_model, store))
    whole = publish(learner, tmp_path / "whole", "float32", unmerged=False)
    served, weights = open_served(tiny_model, "float32")
    sees = [name for name, _ in served.vision_parameters()]
    order = [(0, True), (1, False), (None, True), (0, True), (1, False)]
    for number, changes_operations in order:
        version = whole if number is None else versions[number]
        tensors = weights.check(version[0].adapter, version[1])
        before = weights.digest(sees)
        assert weights.adopt(version[0].adapter, tensors) == changes_operations
        assert weights.digest(sees) != before
        assert not weights.adopt(version[0].adapter, tensors), "the same version again"
        ours = read_logprobs(replace(learner, forward=served), tiny_model, store)
        wanted = logprobs[1 if number is None else number]
        assert np.array_equal(ours, wanted) == (number is not None)
        np.testing.assert_allclose(ours, wanted, atol=1e-4)


def test_joined_layers_have_the_outputs_of_adapted_layers() -> None:
    layers = [torch.nn.Linear(6, width, bias=False) for width in (4, 3)]
    x, model = torch.randn(2, 5, 6), torch.nn.Sequential(*layers)
    joined, plain = _join(False, *layers), [layer(x) for layer in layers]
    adapter = Adapter("", "F32", {"1.weight": 0.5})
    pair = {"1.weight.lora_A": torch.randn(2, 6), "1.weight.lora_B": torch.randn(3, 2)}
    with torch.no_grad():
        assert PolicyWeights(model, dict).adopt(adapter, pair)
        adapted, ours = [layer(x) for layer in layers], joined(x)
    assert not torch.allclose(plain[1], adapted[1], atol=1e-2)
    for one, other in zip(adapted, ours, strict=True):
        torch.testing.assert_close(one, other)


def test_adapter_of_another_base_is_refused_and_changes_nothing(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    learner = build_learner(tiny_model, store, "float32", **BOTH)
    manifest, tensors = publish(learner, tmp_path / "version", "float32")
    other = tmp_path / "other"
    write_tiny("qwen_vl", other, seed=1)
    served, weights = open_served(other, "float32")
    before = {name: p.detach().clone() for name, p in served.model.named_parameters()}
    with pytest.raises(WeightsError, match="a different base"):
        weights.check(manifest.adapter, tensors)
    assert all(p.equal(before[name]) for name, p in served.model.named_parameters())
