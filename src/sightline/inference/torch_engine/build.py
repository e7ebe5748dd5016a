"""Makes an engine from settings. Construction only."""

from __future__ import annotations

import torch

from sightline.compute.lora_weights import AdapterBase
from sightline.compute.model import load_model, pick_device
from sightline.compute.weights import adopt_into, read_weights
from sightline.families import Family
from sightline.inference.settings import ServeSettings
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.weights import Manifest


def build_engine(
    settings: ServeSettings, family: Family, store: MediaStore, banned: tuple[int, ...]
) -> TorchEngine:
    torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    forward = load_model(settings.model, family, device, settings.dtype)

    def read_base() -> dict[str, torch.Tensor]:
        loaded = load_model(settings.model, family, "cpu", settings.dtype)
        return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}

    base = AdapterBase(read_base)
    manifest = Manifest(version=0, vision_version=0, files=[])
    if settings.manifest is not None:
        manifest, tensors = read_weights(settings.manifest)
        adopt_into(forward.model, base.merge(manifest, tensors))
    materializer = Materializer(
        family, store, settings.pixel_cache_bytes, threads=settings.pixel_threads
    )
    materializer.warm_up()
    return TorchEngine(forward, family, materializer, banned, settings, manifest, base)
