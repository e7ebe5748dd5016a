"""Build an inference server and run it until a signal stops it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from sightline.config.secret_refs import resolve_secret
from sightline.families import Family, load_family, load_renderer
from sightline.families.rope import check_length
from sightline.inference.chat_endpoint import ChatEndpoint
from sightline.inference.engine import Engine
from sightline.inference.server import InferenceServer
from sightline.inference.server_spec import ServerSpec, describe_prefix_reuse
from sightline.inference.validator import RequestValidator
from sightline.inference.weight_fetcher import WeightFetcher
from sightline.media import ImageIngestor, MediaStore
from sightline.pixels import Materializer
from sightline.render import Renderer
from sightline.transport.http_server import RequestGuard, build_uvicorn_config, check_address
from sightline.transport.listen import bind_socket, build_listen_error, check_tls, describe_link
from sightline.wire.codec import get_release

CONTROL_PATHS = ("/sightline/v1/lease", "/sightline/v1/adopt")
"""Paths that require the control token, which rollouts do not have."""
KEEP_ALIVE_S = 600
SHUTDOWN_GRACE_S = 10
BACKLOG = 2048
ENGINE_DIED_EXIT_CODE = 70
"""Exit code when the engine's loop has failed. Its traceback is in the log."""


@dataclass(frozen=True)
class ServerComponents:
    """The parts of a server that do not depend on its engine."""

    spec: ServerSpec
    store: MediaStore
    family: Family
    renderer: Renderer

    @classmethod
    def load(cls, spec: ServerSpec, store: MediaStore | None = None) -> ServerComponents:
        """Load the checkpoint's family and renderer. `store` replaces the one in the spec."""
        path, store = spec.model.path, store or spec.open_store()
        family = load_family(path, **spec.model.overrides())
        check_length(family.position_limit, spec.inference.max_model_len)
        images = ImageIngestor(store, takes_addresses=False)
        renderer = load_renderer(path, store, family, images, spec.inference.max_model_len)
        return cls(spec, store, family, renderer)

    def build_materializer(self) -> Materializer:
        """Return the pool that decodes images, with its threads started."""
        spec = self.spec
        materializer = Materializer(
            self.family, self.store, spec.pixel_cache_bytes, threads=spec.num_pixel_threads
        )
        materializer.warm_up()
        return materializer

    def build_server(self, engine: Engine) -> InferenceServer:
        spec, family, renderer = self.spec, self.family, self.renderer
        path, max_model_len = spec.model_path, spec.inference.max_model_len
        validator = RequestValidator(
            family,
            pad_id=next(iter(renderer.pad_token_ids), -1),
            vocab_size=renderer.vocab_size,
            max_model_len=max_model_len,
            models=frozenset({path.name, str(path)}),
            video_pad_id=renderer.video_pad_id,
        )
        identity = {
            "release": get_release(),
            "model": path.name,
            "engine": spec.inference.engine,
            "family": family.name,
            "fingerprint": family.fingerprint,
            "settings": family.settings,
            "pad_token_ids": renderer.pad_token_ids,
            "vocab_size": renderer.vocab_size,
            "max_model_len": max_model_len,
        }
        chat = ChatEndpoint(renderer, family.modality, path.name, max_model_len)
        guard = RequestGuard(
            spec.inference.host,
            resolve_secret(spec.inference.token, "--token"),
            resolve_secret(spec.inference.control_token, "--control-token"),
            lambda method, path: path in CONTROL_PATHS,
        )
        return InferenceServer(
            engine, validator, chat, identity, guard, spec.weights_root,
            WeightFetcher(spec.open_blobs(), spec.media_cache_dir),
        )  # fmt: skip


def serve(spec: ServerSpec, build_engine: Callable[[ServerComponents], Engine]) -> None:
    """Serve until SIGTERM or SIGINT, then refuse unfinished requests with 503."""
    host = spec.inference.host
    check_address(host, spec.inference.token, "--token")
    tls = check_tls(spec.inference.tls_cert, spec.inference.tls_key, host)
    listening = bind_socket(host, spec.inference.port)
    port = listening.getsockname()[1]
    components = ServerComponents.load(spec)
    server = components.build_server(build_engine(components))
    config = build_uvicorn_config(
        server.app,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        **tls,
    )
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        raise build_listen_error(host, port, error) from error
    # Exclude loaded objects from garbage collection. Visiting them takes 0.2 s each time.
    gc.collect()
    gc.freeze()
    server.engine.on_fatal_error = lambda: os._exit(ENGINE_DIED_EXIT_CODE)
    link = describe_link(host, port, has_tls=bool(tls))
    print(f"serving {spec.model.path} at {link}", flush=True)
    print("\n".join(components.renderer.describe()), flush=True)
    print(describe_prefix_reuse(components.family, spec.enable_prefix_caching), flush=True)
    _UvicornServer(config, server).run(sockets=[listening])


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that stops the engine on a signal and does not raise the signal again."""

    def __init__(self, config: uvicorn.Config, server: InferenceServer) -> None:
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Otherwise connections would stay open until their requests are done.
        self._server.engine.stop()
        # Not uvicorn's method, which also records the signal to raise it at the end.
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True
