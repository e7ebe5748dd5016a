"""Makes the engine on top of a vLLM that is loaded. Construction only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sightline.compute.checkpoint_files import open_checkpoint
from sightline.compute.model import empty_parameters
from sightline.families.registry import load_serving
from sightline.inference.serve import ServerComponents
from sightline.inference.vllm_plugin import symbols
from sightline.inference.vllm_plugin.engine import VllmEngine
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems
from sightline.inference.vllm_plugin.weight_updater import WeightUpdater, vision_digest
from sightline.wire.weights import Manifest


def build_engine(client: Any, components: ServerComponents) -> VllmEngine:
    """The engine over `client`, vLLM's EngineClient."""
    spec, family = components.spec, components.family
    path = spec.model_path
    serving = load_serving(path, family, takes_updates=False)
    items = MultiModalItems(
        family=family,
        serving=serving,
        materializer=components.build_materializer(),
        pool=ThreadPoolExecutor(spec.num_pixel_threads, thread_name_prefix="items"),
        normalizes=client.model_config.multimodal_config.mm_device_do_normalize,
        cache=client.renderer.mm_processor_cache,
    )
    updater = WeightUpdater(
        client=client,
        model=path,
        parameters=empty_parameters(path, family),
        vision=serving.VISION_PREFIXES,
        manifest=Manifest(version=0, vision_version=0, files=[]),
        vision_digest=vision_digest(open_checkpoint(path), serving.VISION_PREFIXES),
    )
    return VllmEngine(
        client,
        items,
        updater,
        spec,
        max_image_tokens=client.input_processor.mm_encoder_cache_size,
        sampled_tokens=lambda: sum(symbols.read_sampled_tokens()),
    )
