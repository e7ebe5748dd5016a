"""LoRA: what trains, what is published, and what peft reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import making
import pytest
import torch
from safetensors.torch import load_file

from sightline.compute.lora_weights import AdapterBase, resolve_parameter
from sightline.compute.model import MODEL_DTYPES, load_model
from sightline.config import LoraConfig, RunFile, SftFile, validate_config
from sightline.errors import ConfigError
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.run import RunDir
from sightline.trainer import loop
from sightline.trainer.build import build
from sightline.trainer.export import export_checkpoint
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.lora import (
    add_adapters,
    build_merge_gather,
    describe_adapter,
    digest_frozen,
    plain_parameters,
)
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire.sample import Batch
from sightline.wire.weights import Adapter
from tests.read_back import read_weights

BOTH = {"rank": 4, "alpha": 8.0, "vision_targets": ("*",)}
TEXT = {"rank": 4, "alpha": 8.0}


def learner_of(model: Path, store: MediaStore, train_vision: bool = True, **lora: Any) -> Learner:
    config = making.trainer_config(lr=2e-2, vision_lr=1e-2)
    settings = making.model_config(model, train_vision=train_vision)
    return making.build_learner(settings, config, store, steps=10, lora=LoraConfig(**lora), seed=3)


def batch_of(learner: Learner, model: Path, store: MediaStore) -> ReadyBatch:
    materializer = Materializer(learner.family, store, 1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
    return preparer.prepare(Batch(1, making.samples(model, store, count=4)), "")


def trained(model: Path, store: MediaStore, steps: int = 2, **lora: Any) -> Learner:
    """B begins at zero: before the second step A has no gradient."""
    learner = learner_of(model, store, **lora)
    ready = batch_of(learner, model, store)
    for _ in range(steps):
        learner.step(ready)
    return learner


def groups(learner: Learner) -> dict[str, float]:
    """The peak learning rate of every parameter that trains."""
    names = {id(p): name for name, p in learner.forward.model.named_parameters()}
    return {
        names[id(p)]: group["peak_lr"] for group in learner.optimizer.param_groups
        for p in group["params"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "train_vision", "tower"),
    [(TEXT, False, "frozen"), (TEXT, True, "whole"), (BOTH, True, "adapters")],
)
def test_settings_select_the_trained_parameters(
    tiny_model: Path, store: MediaStore, lora: dict[str, Any], train_vision: bool, tower: str
) -> None:
    learner = learner_of(tiny_model, store, train_vision, **lora)
    vision = {name for name, _ in learner.forward.vision_parameters()}
    before = {n: p.detach().clone() for n, p in learner.forward.model.named_parameters()}
    ready = batch_of(learner, tiny_model, store)
    for _ in range(2):
        learner.step(ready)
    after = dict(learner.forward.model.named_parameters())
    moved = {name for name, old in before.items() if not torch.equal(old, after[name])}
    text = {name for name in moved if name not in vision}
    assert text and all("lora_" in name for name in text)
    in_tower = moved & vision
    if tower == "frozen":
        assert not in_tower
    elif tower == "whole":
        assert in_tower == vision and not any("lora_" in name for name in vision)
    else:
        assert in_tower == {name for name in vision if "lora_" in name} and in_tower
    rates = groups(learner)
    assert rates.keys() >= moved
    assert all(rate == (1e-2 if name in vision else 2e-2) for name, rate in rates.items())


def test_unknown_layer_names_are_refused_with_the_known_ones(
    tiny_model: Path, store: MediaStore
) -> None:
    with pytest.raises(ConfigError, match="no linear layer is called 'q_prj'") as caught:
        learner_of(tiny_model, store, rank=4, targets=("q_prj",))
    assert "q_proj" in caught.value.fix
    with pytest.raises(ConfigError, match="targets is empty"):
        learner_of(tiny_model, store, rank=4, targets=())
    learner = learner_of(tiny_model, store, rank=4, targets=("q_proj", "v_proj"))
    adapted = {n.split(".lora_")[0].rpartition(".")[2] for n in groups(learner) if "lora_" in n}
    assert adapted == {"q_proj", "v_proj"}


@pytest.mark.parametrize("kind", [RunFile, SftFile])
def test_adapters_in_a_frozen_tower_are_refused_at_load(kind: Any) -> None:
    values = {
        "model": {"path": "x", "train_vision": False},
        "env": {"name": "color_codeword"},
        "lora": {"rank": 4, "vision_targets": ["*"]},
    }
    if kind is SftFile:
        values["sft"] = {"output_dir": "y"}
    with pytest.raises(ConfigError, match="vision_targets requires"):
        validate_config(kind, values, "run.toml")


def test_export_writes_a_plain_checkpoint_and_peft_adapters(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    learner = trained(tiny_model, store, **BOTH)
    export_checkpoint(tiny_model, tmp_path / "out", learner.forward.model)
    source = load_file(tiny_model / "model.safetensors")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == source.keys()
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    ids = torch.tensor([[5, 9, 17, 33, 12]])
    with torch.no_grad():
        ours, theirs = plain(input_ids=ids).logits, adapted(input_ids=ids).logits
        untouched = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
        before = untouched(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, theirs, atol=1e-3)
    folded = dict(adapted.merge_and_unload().named_parameters())
    for name, tensor in dict(plain.named_parameters()).items():
        torch.testing.assert_close(folded[name], tensor, atol=1e-6, rtol=1e-5)


def describe(model: torch.nn.Module, dtype: torch.dtype) -> Adapter:
    return describe_adapter(model, dtype, digest_frozen(model, dtype))


@pytest.mark.parametrize("lora", [BOTH, TEXT], ids=["adapters", "tower whole"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unmerged_publish_is_bit_identical_to_merged(
    store: MediaStore, tmp_path: Path, lora: dict[str, Any], dtype: str
) -> None:
    """The trainer's weights are float32. Checkpoints and engines have `dtype`."""
    checkpoint = tmp_path / "tiny"
    write_tiny("qwen_vl", checkpoint, seed=0, dtype=dtype)
    model = trained(checkpoint, store, **lora).forward.model
    published = {
        kind: making.publish(model, tmp_path / kind, 2, MODEL_DTYPES[dtype], stand)
        for kind, stand in (
            ("merged", None),
            ("adapter", describe(model, MODEL_DTYPES[dtype])),
        )
    }
    weights = {kind: read_weights(path) for kind, (path, _) in published.items()}
    served = load_model(checkpoint, load_family(checkpoint), "cpu", dtype).model
    base = {name: parameter.detach() for name, parameter in served.named_parameters()}
    manifest, tensors = weights["adapter"]
    assert manifest.adapter is not None
    AdapterBase(lambda: base).check(manifest.adapter, tensors)
    scales, merged = manifest.adapter.scales, weights["merged"][1]
    theirs = {name: resolve_parameter(name, base, scales, tensors) for name in base}
    assert merged.keys() == theirs.keys()
    for name, tensor in merged.items():
        assert torch.equal(theirs[name].to(tensor.dtype), tensor), name
    assert sum(not torch.equal(merged[name], base[name]) for name in base) > 10
    sizes = {kind: manifest.files[0].nbytes for kind, (_, manifest) in published.items()}
    print(f"\n{dtype}, rank {lora['rank']}: bytes of a version {sizes}")
    assert lora is TEXT or sizes["adapter"] < sizes["merged"]


def test_run_with_adapters_resumes_bit_identically(tiny_model: Path, tmp_path: Path) -> None:
    values = {
        "model": {"path": str(tiny_model)},
        "env": {"name": "color_codeword"},
        "sft": {"output_dir": "", "batch_size": 4},
        "run": {"steps": 4},
        "trainer": {"lr": 1e-2, "device": "cpu", "checkpoint_every": 2, "stall_timeout_s": 0},
        "lora": BOTH,
    }

    def made(folder: str, steps: int) -> loop.TrainerComponents:
        run_dir = RunDir(tmp_path / folder)
        run_dir.make()
        output = {"sft": values["sft"] | {"output_dir": str(tmp_path / folder / "out")}}  # type: ignore
        config = SftFile.model_validate(values | output | {"run": {"steps": steps}})
        return build(config, run_dir)

    loop.run(made("whole", 4))
    loop.run(made("two", 2))
    second = made("two", 4)
    assert second.first_step == 2
    loop.run(second)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, two = (load_file(tmp_path / name / "out" / file) for name in ("whole", "two"))
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_every_family_supports_adapters(tmp_path: Path, store: MediaStore) -> None:
    """Layer names differ between families, so only patterns and blocks are used."""
    model = tmp_path / "kimi"
    write_tiny("kimi_k25", model, seed=0)
    forward = load_model(model, load_family(model), "cpu", "float32")
    before = {name: p.detach().clone() for name, p in forward.model.named_parameters()}
    names = add_adapters(forward, LoraConfig(**BOTH), train_vision=True, seed=0)
    assert len(names) > 4
    gather = build_merge_gather(forward.model)
    tensors = {name: gather(p) for name, p in plain_parameters(forward.model).items()}
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
