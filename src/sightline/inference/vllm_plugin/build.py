"""Makes our server on top of a vLLM that is loaded. Construction only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sightline.compute.checkpoint_files import open_checkpoint
from sightline.compute.model import empty_parameters
from sightline.families import Family
from sightline.families.registry import load_serving
from sightline.inference.serve import ServerComponents
from sightline.inference.server import InferenceServer
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin import symbols
from sightline.inference.vllm_plugin.engine import VllmEngine
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems
from sightline.inference.vllm_plugin.names import CONFIG_KEY
from sightline.inference.vllm_plugin.weight_updater import WeightUpdater, vision_digest
from sightline.wire.weights import Manifest


@dataclass(frozen=True)
class VllmServerComponents:
    server: InferenceServer
    spec: ServerSpec
    family: Family
    keeps_kv: bool
    """Whether the KV cache stays for later requests: vLLM cannot everywhere where it is asked."""
    start: Callable[[], Any]
    """To be awaited once the server has started."""


async def build(app: Any) -> VllmServerComponents:
    """Builds our server on vLLM's application `app`, whose engine is loaded."""
    symbols.check()
    symbols.check_app(app)
    client = app.state.engine_client
    spec = ServerSpec.model_validate(client.vllm_config.additional_config[CONFIG_KEY]["spec"])
    return await asyncio.to_thread(_build_components, client, spec)


def _build_components(client: Any, spec: ServerSpec) -> VllmServerComponents:
    parts = ServerComponents.load(spec)
    family, path = parts.family, spec.model_path
    serving = load_serving(path, family, takes_updates=False)
    items = MultiModalItems(
        family=family,
        serving=serving,
        materializer=parts.build_materializer(),
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
    engine = VllmEngine(
        client,
        items,
        updater,
        spec,
        max_image_tokens=client.input_processor.mm_encoder_cache_size,
        sampled_tokens=lambda: sum(symbols.read_sampled_tokens()),
    )

    async def start() -> None:
        await updater.start()
        if spec.weights is not None:
            await asyncio.to_thread(engine.adopt, spec.weights)

    keeps_kv = client.vllm_config.cache_config.enable_prefix_caching
    server = parts.build_server("vllm", engine)
    return VllmServerComponents(server, spec, family, keeps_kv, start)
