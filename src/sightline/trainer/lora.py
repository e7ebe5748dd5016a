"""LoRA: a frozen matrix W is used as W + s B A, and only A and B train.

peft adds the adapters to the model in place. Exported checkpoints store W + s B A under the name
of W, and so do published weights unless adapters are published unmerged.

    names in the trainer: X.base_layer.weight, X.lora_A.default.weight, X.lora_B.default.weight
    names outside:        X.weight, or X.weight.lora_A and X.weight.lora_B
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sightline.algo.algorithm import Algorithm
from sightline.compute import lora_weights as published
from sightline.compute.tensor_file import (
    SAFETENSORS_DTYPES,
    Gather,
    iterate_gathered,
    write_tensors,
)
from sightline.config import LoraConfig
from sightline.errors import ConfigError
from sightline.families import Forward
from sightline.trainer.shard import full_tensor
from sightline.wire.weights import Adapter

NO_ADAPTERS = LoraConfig()
ADAPTER = "default"
"""peft's default adapter name."""
_BASE = ".base_layer."
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
ADAPTER_FILE = "adapter_model.safetensors"
"""peft's file name for an adapter."""


def add_adapters(
    forward: Forward, settings: LoraConfig, train_vision: bool, seed: int
) -> list[str]:
    """Add adapters to the selected layers, freeze everything else, and return the layers' names.

    A trained vision tower without adapters trains all its parameters. All ranks draw the same
    initial values.
    """
    import peft

    names = _find_target_layers(forward, settings)
    layers: dict[str, Any] = {name: forward.model.get_submodule(name) for name in names}
    config = cast(Any, peft).LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=names
    )
    # peft moves adapters to the device of their matrix, and on the meta device they would lose
    # their values. So a single expanded element temporarily replaces each meta matrix.
    empty = {name: layer.weight for name, layer in layers.items() if layer.weight.is_meta}
    for name, weight in empty.items():
        single = torch.empty((), dtype=weight.dtype).expand(weight.shape)
        layers[name].weight = nn.Parameter(single)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, forward.model)
    for name, weight in empty.items():
        layers[name].weight = weight.requires_grad_(False)
    _require_input_gradients(forward)
    if train_vision and not settings.vision_targets:
        for _, parameter in forward.vision_parameters():
            parameter.requires_grad_(True)
    return names


def _require_input_gradients(forward: Forward) -> None:
    """Make the embedded tokens require gradients on every rank, although embeddings are frozen.

    Image features from a trained tower require gradients anyway. FSDP reduces the first block's
    gradients when they reach its inputs, or else at the very end. Ranks with and without images
    would then run their collectives in different orders, and deadlock.
    """
    vision = {id(parameter) for _, parameter in forward.vision_parameters()}
    for module in forward.model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in vision:
            module.register_forward_hook(lambda module, args, out: out.requires_grad_(True))


def _find_target_layers(forward: Forward, settings: LoraConfig) -> list[str]:
    vision = {id(parameter) for _, parameter in forward.vision_parameters()}
    inside = {id(module) for block in forward.blocks() for module in block.modules()}
    patterns_by_setting = {"targets": settings.targets, "vision_targets": settings.vision_targets}
    known: dict[str, set[str]] = {setting: set() for setting in patterns_by_setting}
    found: list[str] = []
    for name, module in forward.model.named_modules():
        # Subclasses that compute more than a product, such as expert routers, get no adapter.
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            continue
        sees = id(module.weight) in vision
        if not sees and id(module) not in inside:
            continue  # such as the head, which many models share with the embeddings
        last = name.rpartition(".")[2]
        setting = "vision_targets" if sees else "targets"
        known[setting].add(last)
        if any(fnmatch(last, pattern) for pattern in patterns_by_setting[setting]):
            found.append(name)
    for setting, patterns in patterns_by_setting.items():
        names = ", ".join(sorted(known[setting])) or "none: the model has no such layer"
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in known[setting]):
                problem = f"[lora] {setting}: no linear layer is called {pattern!r}"
                raise ConfigError(problem, f"choose among {names}")
    if not found:
        raise ConfigError("[lora] targets is empty", 'set it, for example to ["*"]')
    return found


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters under their outside names, without adapters and value head."""
    return {
        name.replace(_BASE, "."): parameter
        for name, parameter in model.named_parameters()
        if not name.endswith((_A, _B)) and not is_value_head(name)
    }


def build_merge_gather(model: nn.Module) -> Gather:
    """Return a function that gathers a plain parameter, and merges W into W + s B A.

    If the model is sharded, every rank calls it for the same parameters in the same order.
    """
    parameters = dict(model.named_parameters())
    added = {}
    for layer in _adapted_layers(model):
        a, b = parameters[f"{layer}{_A}"], parameters[f"{layer}{_B}"]
        added[id(parameters[f"{layer}{_BASE}weight"])] = (a, b, _scale(model, layer))

    def gather(tensor: Tensor) -> Tensor:
        full = full_tensor(tensor)
        if (adapter := added.get(id(tensor))) is None:
            return full
        b, a = full_tensor(adapter[1]), full_tensor(adapter[0])
        return published.merge_lora(full, a, b, adapter[2])

    return gather


def digest_frozen(model: nn.Module, dtype: torch.dtype) -> str:
    """Return the digest of the frozen parameters as `dtype`, or an empty string if there are none.

    Every rank calls it.
    """
    frozen = {n: p for n, p in plain_parameters(model).items() if not p.requires_grad}
    if not frozen:
        return ""
    return published.digest_tensors(iterate_gathered(frozen, full_tensor), dtype)


def describe_adapter(model: nn.Module, dtype: torch.dtype, base: str) -> Adapter:
    """Describe the adapters' scales and their base, whose digest is `base`."""
    scales = {f"{layer}.weight": _scale(model, layer) for layer in _adapted_layers(model)}
    return Adapter(base, SAFETENSORS_DTYPES[dtype], scales)


Selected = tuple[dict[str, Tensor], Gather, torch.dtype | None]
"""The tensors of a version, the function that gathers them, and the dtype to write."""


def select_published(model: nn.Module, adapter: Adapter | None, dtype: torch.dtype) -> Selected:
    """Return what to publish of a model.

    Adapters keep their training dtype: rounded adapters would not merge to the trainer's weights.
    """
    plain, parameters = plain_parameters(model), dict(model.named_parameters())
    if adapter is None:
        return plain, build_merge_gather(model), dtype
    # All trained parameters: A and B under the name of their W, and those without adapters.
    published_parameters = {
        name: parameter for name, parameter in plain.items() if parameter.requires_grad
    }
    for layer in _adapted_layers(model):
        for inside, outside in ((_A, published.LORA_A), (_B, published.LORA_B)):
            published_parameters[f"{layer}.weight{outside}"] = parameters[f"{layer}{inside}"]
    return published_parameters, full_tensor, None


def gather_for_lead(tensors: Mapping[str, Tensor], gather: Gather = full_tensor) -> None:
    """Hand over this rank's shards while rank 0 writes `tensors`. All other ranks call it."""
    for _ in iterate_gathered(tensors, gather):
        pass


def save_adapters(model: nn.Module, target: Path, source: Path) -> None:
    """Write the adapters in peft's format, for `PeftModel.from_pretrained(model, target)`."""
    target.mkdir(parents=True)
    configs: Any = model.peft_config
    config = copy.copy(configs[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = str(source), True
    config.save_pretrained(target)
    write_tensors(
        target / ADAPTER_FILE, peft_tensors(model), full_tensor, metadata={"format": "pt"}
    )


def peft_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters under peft's names."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if name.endswith((_A, _B))
    }


def _adapted_layers(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_parameters():
        if name.endswith(_A):
            yield name.removesuffix(_A)


def _scale(model: nn.Module, layer: str) -> float:
    scaling: Any = model.get_submodule(layer).scaling
    return float(scaling[ADAPTER])


VALUE_HEAD = "value_head"
"""The value head's name in the model. Only the trainer's own checkpoints contain it."""


def add_value_head(
    forward: Forward, algorithm: Algorithm, device: torch.device, seed: int
) -> nn.Module | None:
    """Add the algorithm's value head to the model. Return None if it needs no values.

    All ranks draw the same initial values.
    """
    if not algorithm.needs.values:
        return None
    model = cast(Any, forward.model)
    weight: Tensor = model.get_output_embeddings().weight
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head: nn.Module = algorithm.build_value_head(weight.shape[-1])
    hidden = torch.zeros(2, weight.shape[-1])
    if (shape := tuple(head(hidden).shape)) != (2,):
        raise ConfigError(
            f"the value head of {type(algorithm).__name__} returns shape {shape} for 2 tokens",
            "return one value per token: squeeze the last dimension",
        )
    model.add_module(VALUE_HEAD, head.to(device, weight.dtype))
    return head


def is_value_head(name: str) -> bool:
    """Return whether a parameter of this name belongs to a value head."""
    return name.startswith(f"{VALUE_HEAD}.")
