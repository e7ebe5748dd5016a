"""A sampler in this process: the embedded engine in its thread, and rollouts that use it.

    rollouts (event loop) --requests--> engine (own thread) --done--> rollouts

There is no HTTP and no other thread, because on one core they would only cost time.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from PIL import Image

from sightline.config import ModelConfig
from sightline.envs import Environment
from sightline.errors import ProcessFailed
from sightline.families import Family, load_family, load_renderer
from sightline.inference.engine import EngineRequest
from sightline.inference.server import build_response
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.validator import RequestValidator
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.render import Renderer
from sightline.rollout.chat import RolloutChat
from sightline.rollout.chat_sources import ChatSource
from sightline.rollout.client import GenerateClient
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest
from sightline.wire.generate import GenerateRequest, GenerateResponse, check_answer

MAX_MODEL_LEN = 128
MAX_TOKENS = 8
ROLLOUT_TIMEOUT_S = 600.0


class InlineExecutor(Executor):
    """Runs work in the calling thread, because with one core threads only add switches."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


@dataclass
class EngineClient(GenerateClient):
    """A client that calls the engine in this process, as a server would."""

    engine: TorchEngine = field(kw_only=True)
    validator: RequestValidator = field(kw_only=True)
    proves_pixels: bool = field(default=True, kw_only=True)
    """Whether answers contain the digests of the engine's pixels."""

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        checked = self.validator.check_request(request)
        requests = self.engine.build_requests(checked)
        finished = asyncio.get_running_loop().create_future()
        for one in requests:  # one choice per turn
            one.owner = finished
        self.engine.submit(requests)  # type: ignore[arg-type]
        await finished
        response = build_response(checked, requests)
        check_answer(request, response, self.vocab_size, self.banned_token_ids, self.max_model_len)
        return response if self.proves_pixels else msgspec.structs.replace(response, sightline=None)


@dataclass(kw_only=True)
class EngineChats(ChatSource):
    client: EngineClient
    renderer: Renderer
    modality: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pool = InlineExecutor()  # type: ignore[assignment]

    def build(self, request: RolloutRequest, trace: Trace) -> RolloutChat:
        return RolloutChat(
            **self._shared(request, trace),
            renderer=self.renderer,
            client=self.client,
            modality=self.modality,
            max_model_len=MAX_MODEL_LEN,
        )


def change_filter(family: Family, name: str) -> Family:
    """Return a family that resizes with another filter but keeps its identity, like a sampler
    without proof of its pixels. In a run, fingerprints and pixel digests detect it."""
    changed: Any = copy.copy(family)
    resample = int(Image.Resampling[name.upper()])
    changed._settings = dataclasses.replace(changed._settings, resample=resample)
    return changed


class Sampler:
    """An engine and a rollout player, which a run has in two separate processes."""

    def __init__(
        self, model: ModelConfig, env: Environment, store: MediaStore, device: str, rows: int,
        filter_name: str = "",
    ) -> None:  # fmt: skip
        """Start the engine. `filter_name` is Pillow's name of the resize filter, empty for the
        checkpoint's own."""
        spec = ServerSpec.of(
            **model.model_dump(),
            media_roots=(store.root,), device=device, threads=torch.get_num_threads(),
            max_num_seqs=rows, max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip
        family = load_family(model.path, **model.overrides())
        renderer = load_renderer(model.path, store, family)
        sampler_family = change_filter(family, filter_name) if filter_name else family
        banned = renderer.pad_token_ids
        self.engine = build_engine(
            spec, sampler_family, Materializer(sampler_family, store, 1 << 26), banned
        )
        validator = RequestValidator(
            family, banned[0], renderer.vocab_size, MAX_MODEL_LEN, frozenset()
        )
        client = EngineClient(
            "engine", engine=self.engine, validator=validator, proves_pixels=not filter_name,
            vocab_size=renderer.vocab_size, banned_token_ids=banned, max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip
        chats = EngineChats(
            store=store, max_tokens=MAX_TOKENS, client=client, renderer=renderer,
            modality=family.modality,
        )  # fmt: skip
        self._player = RolloutPlayer(env, chats, ROLLOUT_TIMEOUT_S)
        self._runner = asyncio.Runner()
        loop = self._runner.get_loop()

        def deliver(done: list[EngineRequest]) -> None:
            loop.call_soon_threadsafe(_finish, done)

        self.engine.start(deliver)

    def play(self, requests: list[RolloutRequest]) -> list[Trace]:
        async def play_all() -> list[Trace]:
            played = await asyncio.gather(*map(self._player.play, requests))
            return [rollout.trace for rollout in played]

        traces = self._runner.run(play_all())
        for trace in traces:
            if trace.error:
                raise ProcessFailed(f"rollout {trace.id}: {trace.error}", "report this bug")
        return traces

    def close(self) -> None:
        self.engine.stop()
        self.engine.join(60)
        self._runner.run(self._player.close())
        self._runner.close()


def _finish(requests: list[EngineRequest]) -> None:
    for request in requests:
        if not request.owner.done():
            request.owner.set_result(None)
