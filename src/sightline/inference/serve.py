"""Builds a server and runs it until it is told to end."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import msgspec
import uvicorn

from sightline.errors import ConfigError
from sightline.families import Family, load_family, load_renderer
from sightline.inference.chat_endpoint import ChatEndpoint
from sightline.inference.engine import Engine
from sightline.inference.server import InferenceServer, RequestFactory
from sightline.inference.settings import ServeSettings, describe_prefix_reuse
from sightline.inference.validator import RequestValidator, ValidatedRequest
from sightline.media import ImageIngestor, MediaStore
from sightline.render import Renderer
from sightline.run.otel import open_stages

KEEP_ALIVE_S = 600
SHUTDOWN_GRACE_S = 10
BACKLOG = 2048
ENGINE_DIED_EXIT_CODE = 70
"""Exit code when the engine's loop has failed beyond repair; its traceback is in the log."""


@dataclass(frozen=True)
class ServerComponents:
    """What a server has of its checkpoint, whichever engine computes."""

    settings: ServeSettings
    store: MediaStore
    family: Family
    images: ImageIngestor
    """Takes the images of people's requests into the store."""
    renderer: Renderer

    @classmethod
    def load(cls, settings: ServeSettings) -> ServerComponents:
        if not settings.media_roots:
            raise ConfigError("a server without a media root", "name the store's folder")
        store = MediaStore(settings.media_roots[0], fallback_roots=settings.media_roots[1:])
        family = load_family(settings.model, **settings.overrides)
        images = ImageIngestor(store)
        renderer = load_renderer(settings.model, store, family, images)
        return cls(settings, store, family, images, renderer)

    def server(self, name: str, engine: Engine, build_requests: RequestFactory) -> InferenceServer:
        """The HTTP side of `engine`; `build_requests` turns a checked request into the engine's own."""
        settings, family, renderer = self.settings, self.family, self.renderer
        validator = RequestValidator(
            family,
            pad_id=renderer.pad_token_ids[0],
            vocab_size=renderer.vocab_size,
            max_model_len=settings.max_model_len,
            models=frozenset({settings.model.name, str(settings.model)}),
        )
        identity = {
            "model": settings.model.name,
            "engine": name,
            "family": family.name,
            "fingerprint": family.fingerprint,
            "settings": family.settings,
            "pad_token_ids": renderer.pad_token_ids,
            "vocab_size": renderer.vocab_size,
            "max_model_len": settings.max_model_len,
        }
        chat = ChatEndpoint(
            renderer,
            self.images,
            family.modality,
            settings.model.name,
            settings.max_model_len,
            settings.max_body_bytes,
        )
        stages = open_stages(settings.otel, settings.name)
        return InferenceServer(
            engine, validator, build_requests, chat, identity, settings.max_body_bytes, stages
        )


def build_server(settings: ServeSettings) -> InferenceServer:
    """The server with its model loaded; `InferenceServer.app` is an ASGI application."""
    from sightline.inference.torch_engine.build import build_engine
    from sightline.inference.torch_engine.request import TorchRequest

    parts = ServerComponents.load(settings)
    engine = build_engine(settings, parts.family, parts.store, parts.renderer.pad_token_ids)
    seeds = random.SystemRandom()

    def build_requests(checked: ValidatedRequest) -> list[TorchRequest]:
        params = checked.params
        if params.prompt_logprobs is not None:
            # Tokens whose keys and values are kept are not computed, so they have no logprobs.
            params = msgspec.structs.replace(params, skip_reading_prefix_cache=True)
        seed = seeds.getrandbits(64) if params.seed is None else params.seed
        return [
            TorchRequest(
                checked.prompt,
                checked.slots,
                checked.keys,
                params,
                derive_choice_seed(seed, choice),
            )
            for choice in range(params.n)
        ]

    return parts.server("torch", engine, build_requests)


def derive_choice_seed(seed: int, choice: int) -> int:
    """Choice 0 is what the seed gives alone; the others draw apart from it."""
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**64


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket, so that a taken port is known before the model loads."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(kind, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise _listen_error(host, port, error) from error
    return made


def serve(settings: ServeSettings) -> None:
    """Serves until SIGTERM or SIGINT; unfinished requests are then refused with 503."""
    listening = bind_socket(settings.host, settings.port)
    port = listening.getsockname()[1]
    server = build_server(settings)
    config = uvicorn.Config(
        server.app,
        access_log=False,
        log_level="warning",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        raise _listen_error(settings.host, port, error) from error
    # What is loaded by now stays: walking over it again costs 0.2 s at every full collection.
    gc.collect()
    gc.freeze()
    server.engine.on_fatal_error = lambda: os._exit(ENGINE_DIED_EXIT_CODE)
    print(f"serving {settings.model} at http://{settings.host}:{port}", flush=True)
    print(describe_prefix_reuse(load_family(settings.model, **settings.overrides)), flush=True)
    _UvicornServer(config, server).run(sockets=[listening])


class _UvicornServer(uvicorn.Server):
    """Ends with the engine, and returns instead of dying by the signal."""

    def __init__(self, config: uvicorn.Config, server: InferenceServer) -> None:
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Without this, connections would stay open for as long as their requests take.
        self._server.engine.stop()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in wanted}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def _listen_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen at {host}:{port}: {error.strerror or error}",
        "end the process that holds the port, set another port, or port = 0 for a free one",
    )
