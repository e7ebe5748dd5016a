"""ASGI middleware that runs our server inside vLLM's and answers every path.

It is the outermost middleware, so that vLLM's handlers, template and image processor never run. It
starts and stops with vLLM's application.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sightline.compute.checkpoint_files import open_checkpoint
from sightline.compute.model import empty_parameters
from sightline.families.registry import load_serving
from sightline.inference.serve import ENGINE_DIED_EXIT_CODE, ServerComponents
from sightline.inference.server import InferenceServer
from sightline.inference.server_spec import ServerSpec, describe_prefix_reuse
from sightline.inference.vllm_plugin import CONFIG_KEY, check_version, symbols
from sightline.inference.vllm_plugin.engine import VllmEngine
from sightline.inference.vllm_plugin.multimodal_items import MultiModalItems
from sightline.inference.vllm_plugin.weight_updater import WeightUpdater, vision_digest
from sightline.transport.http_server import LimitedProtocol
from sightline.transport.listen import describe_link
from sightline.wire.weights import Manifest

FLUSH_S = 0.3
"""Seconds between refusing requests at shutdown and closing connections."""
ENGINE_CHECK_S = 1.0


class Middleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._stack = AsyncExitStack()
        self._server: InferenceServer | None = None
        self._is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._wrap_lifespan_send(scope, send))
        elif scope["type"] == "http" and self._server is not None:
            await self._server.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    def _wrap_lifespan_send(self, scope: Scope, send: Send) -> Send:
        """Wrap `send` so that our server starts and stops with vLLM's application."""

        async def sending(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._start(scope["app"])
                except BaseException as error:
                    message = {"type": "lifespan.startup.failed", "message": str(error)}
                    await self._stack.aclose()
            if message["type"] == "lifespan.shutdown.complete":
                await self._stack.aclose()
            await send(message)

        return sending

    async def _start(self, app: Any) -> None:
        check_version()
        client, uvicorn_server = app.state.engine_client, app.state.server
        vllm_config = client.vllm_config
        spec = ServerSpec.model_validate(vllm_config.additional_config[CONFIG_KEY]["spec"])
        components = await asyncio.to_thread(ServerComponents.load, spec)
        engine = await asyncio.to_thread(build_engine, client, components)
        server = await asyncio.to_thread(components.build_server, engine)
        # vLLM may turn prefix caching off by itself.
        keeps_kv = vllm_config.cache_config.enable_prefix_caching
        engine.on_fatal_error = lambda: os._exit(ENGINE_DIED_EXIT_CODE)
        await self._stack.enter_async_context(server.app.router.lifespan_context(server.app))
        await engine.take_first_weights()
        self._server = server
        # Applies to all connections, because none has been accepted yet.
        uvicorn_server.config.http_protocol_class = LimitedProtocol

        def end() -> None:
            self._is_stopping = True
            engine.stop()
            loop.call_later(FLUSH_S, setattr, uvicorn_server, "should_exit", True)

        async def watch_engine() -> None:
            # vLLM's own watchdog would exit with code 0.
            while True:
                await asyncio.sleep(ENGINE_CHECK_S)
                if client.errored and not self._is_stopping:
                    os._exit(ENGINE_DIED_EXIT_CODE)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        for work in (watch_engine(), announce(uvicorn_server, components, keeps_kv)):
            task = loop.create_task(work)
            self._stack.callback(task.cancel)


def build_engine(client: Any, components: ServerComponents) -> VllmEngine:
    """Return the engine in front of `client`, vLLM's EngineClient."""
    spec, family, path = components.spec, components.family, components.spec.model_path
    serving = load_serving(path, family, takes_updates=False)
    vision = serving.vision_prefixes(family)
    images = client.model_config.multimodal_config  # None for a text-only model
    normalizes = images is not None and images.mm_device_do_normalize
    pool = ThreadPoolExecutor(spec.num_pixel_threads, thread_name_prefix="items")
    materializer, cache = components.build_materializer(), client.renderer.mm_processor_cache
    items = MultiModalItems(family, serving, materializer, pool, normalizes, cache)
    manifest = Manifest(version=0, vision_version=0, files=[], run=spec.run_id)
    digest = vision_digest(open_checkpoint(path), vision)
    parameters = empty_parameters(path, family)
    updater = WeightUpdater(client, path, parameters, vision, manifest, digest)
    max_image_tokens = client.input_processor.mm_encoder_cache_size
    sampled_tokens = symbols.read_sampled_tokens
    return VllmEngine(client, items, updater, spec, max_image_tokens, sampled_tokens)


async def announce(server: uvicorn.Server, components: ServerComponents, keeps_kv: bool) -> None:
    """Print the server's address once it listens."""
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.05)
    inference = components.spec.inference
    link = describe_link(inference.host, inference.port, has_tls=bool(inference.tls_cert))
    print(f"serving {components.spec.model.path} at {link}", flush=True)
    print(describe_prefix_reuse(components.family, keeps_kv), flush=True)
