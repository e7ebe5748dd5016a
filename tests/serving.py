"""A live server in a thread of the test process, its client, and transformers as the reference."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import uvicorn
import vllm_servers

from sightline.cli.main import build_parser
from sightline.config import InferenceConfig, ModelConfig
from sightline.families import Family, load_family, load_renderer
from sightline.inference.serve import ServerComponents
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_from_components
from sightline.media import MediaStore
from sightline.render import Bridged
from sightline.transport.http_server import build_uvicorn_config
from sightline.transport.listen import bind_socket, check_tls
from sightline.wire import Slot
from sightline.wire.generate import (
    AdoptRequest,
    ErrorAnswer,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@dataclass
class Client:
    """Speaks the generate protocol to one address."""

    host: str
    port: int
    modality: str = "image"
    engine: str = "torch"
    before: dict[str, float] = field(default_factory=dict)
    """The server's totals when the test began, because a server serves many tests."""
    token: str = ""

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            headers = {"content-type": "application/json"}
            headers |= {"authorization": f"Bearer {self.token}"} if self.token else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def generate(
        self,
        tokens: Sequence[int],
        slots: Sequence[Slot] = (),
        params: SamplingParams = GREEDY,
        rollout_id: str = "",
    ) -> GenerateResponse:
        request = GenerateRequest.of(list(tokens), list(slots), params, self.modality, rollout_id)
        status, body, _ = self.call("POST", "/inference/v1/generate", msgspec.json.encode(request))
        assert status == 200, body
        return msgspec.json.decode(body, type=GenerateResponse)

    def refused(self, body: bytes, path: str = "/inference/v1/generate") -> ErrorBody:
        """Return the error that answers a request."""
        status, answer, headers = self.call("POST", path, body)
        error = msgspec.json.decode(answer, type=ErrorAnswer).error
        assert error.code == status
        assert ("retry-after" in headers) == (status == 503)
        return error

    def adopt(self, manifest: Path) -> dict[str, Any]:
        body = msgspec.json.encode(AdoptRequest(str(manifest)))
        status, answer, _ = self.call("POST", "/sightline/v1/adopt", body)
        assert status == 200, answer
        reply: dict[str, Any] = msgspec.json.decode(answer)
        return reply

    def get(self, path: str) -> dict[str, Any]:
        status, answer, _ = self.call("GET", path)
        assert status == 200
        body: dict[str, Any] = msgspec.json.decode(answer)
        return body

    def totals(self) -> dict[str, float]:
        counters: dict[str, float] = self.get("/sightline/v1/stats")["totals"]
        return {name: value - self.before.get(name, 0) for name, value in counters.items()}

    def now(self) -> dict[str, float]:
        gauges: dict[str, float] = self.get("/sightline/v1/stats")["now"]
        return gauges

    def wait_for(self, group: str, name: str, at_least: float, timeout_s: float = 30.0) -> None:
        """Wait until a statistic of the server has a value."""
        deadline = time.monotonic() + timeout_s
        look = self.totals if group == "totals" else self.now
        while look()[name] < at_least:
            assert time.monotonic() < deadline, f"{name} stays under {at_least}"
            time.sleep(0.01)


class Together:
    """Requests that are in flight at the same time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(64)

    def generate(self, *args: Any, **kwargs: Any) -> Future[GenerateResponse]:
        return self._pool.submit(self._client.generate, *args, **kwargs)


@contextmanager
def live(settings: ServerSpec) -> Iterator[Client]:
    """A server on a free port, with its event loop in a thread.

    Where the tests are run on vLLM, it is a server of theirs with these settings.
    """
    if vllm_servers.python:
        with vllm_servers.lend(settings) as (port, before):
            yield Client("127.0.0.1", port, modality_of(settings), "vllm", before)
    else:
        with embedded(settings) as client:
            yield client


@contextmanager
def embedded(settings: ServerSpec, store: MediaStore | None = None) -> Iterator[Client]:
    """Start a server of the embedded engine. `store` replaces the settings' own."""
    listening = bind_socket(settings.inference.host, 0)
    components = ServerComponents.load(settings, store)
    server = components.build_server(build_from_components(components))
    inference = settings.inference
    tls = check_tls(inference.tls_cert, inference.tls_key, inference.host)
    config = build_uvicorn_config(server.app, lifespan="on", **tls)
    running = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(running.serve(sockets=[listening])), daemon=True
    )
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield Client(*listening.getsockname()[:2], modality_of(settings))
    finally:
        server.engine.stop()
        running.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()


@contextmanager
def serve_here(
    model: Path, media: Path | str, more: Sequence[str] = (), threads: int = 1
) -> Iterator[str]:
    """Serve in this process, with the options of `temporary_server`, and yield the address.

    No new process has to import torch again.
    """
    args = build_parser(["serve"]).parse_args(["serve", str(model), "--media", str(media), *more])
    names = {*ServerSpec.model_fields, *ModelConfig.model_fields, *InferenceConfig.model_fields}
    options = {name: value for name, value in vars(args).items() if name in names}
    settings = ServerSpec.of(
        **{name: value for name, value in options.items() if value is not None}
    )
    with embedded(settings) as client:
        yield f"http://{client.host}:{client.port}"


def modality_of(settings: ServerSpec) -> str:
    return load_family(settings.model.path).modality


class Reference:
    """transformers' own model with its own attention, one forward pass per question."""

    def __init__(self, model: Path, store: MediaStore) -> None:
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(
            model, attn_implementation="sdpa", local_files_only=True
        )
        self.family: Any = load_family(model)
        self.renderer = load_renderer(model, store)
        self.store = store

    def _inputs(self, tokens: Sequence[int], slots: Sequence[Slot]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(tokens)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if slots and self.family.name == "anyvlm":
            inputs |= self._processed(slots)
        elif slots:
            rows = [
                self.family.rows(self.family.patches(self.store.image(s.item.ref), s.item))
                for s in slots
            ]
            inputs["pixel_values"] = torch.from_numpy(np.concatenate(rows))
            inputs["image_grid_thw"] = torch.tensor([slot.item.grid for slot in slots])
        if slots and self.family.num_axes > 1:  # positions follow images: it wants to know where
            kinds = torch.zeros_like(ids)
            for slot in slots:
                kinds[0, slot.offset : slot.end] = 1
            inputs["mm_token_type_ids"] = kinds
        return inputs

    def _processed(self, slots: Sequence[Slot]) -> dict[str, torch.Tensor]:
        """Return the checkpoint's own processor outputs for the images, by array name."""
        from sightline.families.anyvlm.processor import load_processor, process

        processor, findings = load_processor(self.family.path), self.family.findings
        patches = [process(processor, self.store.image(slot.item.ref))[0] for slot in slots]
        axes = {spec.name: int(spec.has_batch) for spec in findings.arrays}
        axes |= {findings.grid_array: 0} if findings.grid_array else {}
        return {
            name: torch.from_numpy(join_padded([arrays[name] for arrays in patches], axis))
            for name, axis in axes.items()
        }

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], slots: Sequence[Slot]) -> torch.Tensor:
        out: torch.Tensor = self.model(**self._inputs(tokens, slots)).logits[0].float()
        return out

    def logprobs(
        self,
        prompt: Sequence[int],
        said: Sequence[int],
        slots: Sequence[Slot],
        temperature: float = 1.0,
    ) -> np.ndarray:
        """Return the logprobs of the tokens in `said`, without banned ids."""
        logits = self.logits([*prompt, *said], slots)[len(prompt) - 1 : -1]
        logits[:, list(self.renderer.pad_token_ids)] = float("-inf")
        logs = (logits / temperature).log_softmax(-1)
        chosen: np.ndarray = logs.gather(1, torch.tensor(said)[:, None])[:, 0].numpy()
        return chosen

    @torch.no_grad()
    def greedy(self, tokens: Sequence[int], slots: Sequence[Slot], count: int) -> list[int]:
        out = self.model.generate(
            **self._inputs(tokens, slots),
            do_sample=False,
            max_new_tokens=count,
            suppress_tokens=list(self.renderer.pad_token_ids),
            eos_token_id=None,
        )
        completion: list[int] = out[0, len(tokens) :].tolist()
        return completion


def read_seen(folder: Path, family: Any) -> np.ndarray:
    """The rows that vLLM's vision tower was called with, as a hook in its worker wrote them down.
    Images that it was given whole are cut up."""
    files = sorted(folder.glob("seen-*.npy"))
    arrays = [np.load(file) for file in files]
    if family.name == "anyvlm" and family.findings.rule == "lines":
        from sightline.families.anyvlm.processor import cut_patches

        patch = family.findings.rule_settings["patch"]
        arrays = [cut_patches(image, patch) for images in arrays for image in images]
    return np.concatenate(arrays) if arrays else np.empty(0)


def join_padded(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Arrays end to end, each with zeros behind it up to the largest of the other sides."""
    sides = np.max([array.shape for array in arrays], axis=0)
    padded = []
    for array in arrays:
        missing = sides - array.shape
        missing[axis] = 0
        padded.append(np.pad(array, [(0, num) for num in missing]))
    return np.concatenate(padded, axis)


def next_turn(
    renderer: Any, prompt: Sequence[int], slots: Sequence[Slot], answer: Sequence[int], message: Any
) -> tuple[list[int], list[Slot]]:
    """Return the prompt that follows an answer."""
    bridged = renderer.bridge(prompt, answer, [message])
    assert isinstance(bridged, Bridged), bridged
    return [*prompt, *answer, *bridged.token_ids], [*slots, *bridged.slots]


__all__ = ["GREEDY", "Client", "Family", "Reference", "Together", "live", "next_turn"]
