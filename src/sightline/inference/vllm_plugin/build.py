"""Makes our server on top of a vLLM that is loaded. Construction only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sightline.compute.model import empty_parameters
from sightline.families import Family
from sightline.families.registry import load_serving
from sightline.inference.serve import ServerComponents, derive_choice_seed
from sightline.inference.server import InferenceServer
from sightline.inference.settings import ServeSettings
from sightline.inference.validator import ValidatedRequest
from sightline.inference.vllm_plugin import CONFIG_KEY, symbols
from sightline.inference.vllm_plugin.engine import VllmEngine
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems
from sightline.inference.vllm_plugin.request import VllmRequest
from sightline.inference.vllm_plugin.weight_updater import WeightUpdater, vision_digest
from sightline.pixels import Materializer
from sightline.wire.weights import Manifest


@dataclass(frozen=True)
class VllmServerComponents:
    server: InferenceServer
    settings: ServeSettings
    family: Family
    keeps_kv: bool
    """Whether keys and values stay for later requests: vLLM cannot everywhere where it is asked."""
    start: Callable[[], Any]
    """To be awaited once the server has started."""


async def build(app: Any) -> VllmServerComponents:
    """On vLLM's application `app`, whose engine is loaded."""
    symbols.check()
    symbols.check_app(app)
    client = app.state.engine_client
    settings = ServeSettings.from_json(client.vllm_config.additional_config[CONFIG_KEY]["settings"])
    return await asyncio.to_thread(_build_components, client, settings)


def _build_components(client: Any, settings: ServeSettings) -> VllmServerComponents:
    parts = ServerComponents.load(settings)
    family = parts.family
    serving = load_serving(settings.model, family, takes_updates=False)
    materializer = Materializer(
        family, parts.store, settings.pixel_cache_bytes, threads=settings.pixel_threads
    )
    materializer.warm_up()
    items = MultiModalItems(
        family=family,
        serving=serving,
        materializer=materializer,
        pool=ThreadPoolExecutor(settings.pixel_threads, thread_name_prefix="items"),
        normalizes=client.model_config.multimodal_config.mm_device_do_normalize,
        cache=client.renderer.mm_processor_cache,
    )
    updater = WeightUpdater(
        client=client,
        model=settings.model,
        parameters=empty_parameters(settings.model, family),
        vision=serving.VISION_PREFIXES,
        manifest=Manifest(version=0, vision_version=0, files=[]),
        vision_digest=_vision_digest(settings.model, serving.VISION_PREFIXES),
    )
    engine = VllmEngine(
        client,
        items,
        updater,
        settings,
        max_image_tokens=client.input_processor.mm_encoder_cache_size,
        sampled_tokens=lambda: sum(symbols.read_sampled_tokens()),
    )

    async def start() -> None:
        await updater.start()
        if settings.manifest is not None:
            await asyncio.to_thread(engine.adopt, settings.manifest)

    keeps_kv = client.vllm_config.cache_config.enable_prefix_caching
    return VllmServerComponents(
        parts.server("vllm", engine, build_requests), settings, family, keeps_kv, start
    )


def build_requests(checked: ValidatedRequest) -> list[VllmRequest]:
    params = checked.params
    return [
        VllmRequest(
            checked.prompt,
            checked.slots,
            checked.keys,
            params,
            None if params.seed is None else derive_choice_seed(params.seed, choice),
        )
        for choice in range(params.n)
    ]


def _vision_digest(model: Path, prefixes: tuple[str, ...]) -> str:
    tensors: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= {
            name: tensor for name, tensor in load_file(file).items() if name.startswith(prefixes)
        }
    return vision_digest(tensors, prefixes)
