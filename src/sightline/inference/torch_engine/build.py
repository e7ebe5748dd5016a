"""Makes an engine from settings. Construction only."""

from __future__ import annotations

import torch

from sightline.compute.lora_weights import AdapterBase
from sightline.compute.model import load_model, pick_device
from sightline.compute.weights import adopt_into, read_weights
from sightline.families import Family
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.pixels import Materializer
from sightline.wire.weights import Manifest


def build_engine(
    spec: ServerSpec, family: Family, materializer: Materializer, banned: tuple[int, ...]
) -> TorchEngine:
    torch.set_num_threads(spec.num_threads)
    device, dtype = pick_device(spec.inference.device), spec.model.dtype
    forward = load_model(spec.model.path, family, device, dtype)

    def read_base() -> dict[str, torch.Tensor]:
        loaded = load_model(spec.model.path, family, "cpu", dtype)
        return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}

    base = AdapterBase(read_base)
    manifest = Manifest(version=0, vision_version=0, files=[])
    if spec.weights is not None:
        manifest, tensors = read_weights(spec.weights)
        adopt_into(forward.model, base.merge(manifest, tensors))
    return TorchEngine(forward, family, materializer, banned, spec, manifest, base)
