"""Speaks to a vLLM that is not ours: its own code makes the pixels, so nothing proves them.

A request goes out with one pad for each image and the address of its file; vLLM expands and
processes. The ids that it expanded come back and are compared with ours: a difference is an error.
Answers carry no pixel digests, and the trainer refuses such samples unless the run file allows it.

Weights go in by the routes that vLLM has in its development mode: requests in flight end first,
then the published files are loaded in place of the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sightline.errors import EngineError
from sightline.media import MediaStore
from sightline.rollout.client import GenerateClient
from sightline.run.stages import NO_STAGE, Stage
from sightline.wire import Slot
from sightline.wire.generate import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    Placeholder,
    decode_answer,
)
from sightline.wire.weights import read_manifest

BAN_BIAS = -100.0
"""The lowest bias that vLLM takes: a banned id keeps less than 1e-43 of its probability. The pads
go into each request's `logit_bias` so."""
NUM_SHOWN_IDS = 8
"""Ids on either side of a difference that an error shows."""


class StockVLLMResponse(msgspec.Struct, frozen=True):
    """What we read of vLLM's own answer."""

    request_id: str
    choices: list[Choice]
    prompt_token_ids: list[int]
    """Ids of the prompt as vLLM expanded it."""
    mm_placeholders: dict[str, list[Placeholder]] | None = None


@dataclass(kw_only=True)
class StockVLLMClient(GenerateClient):
    """A client of one vLLM server that does not have our plugin."""

    store: MediaStore
    shares_store: bool = True
    """Whether the server may read the store (`--allowed-local-media-path`). Where it may not,
    images are sent as data urls."""

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        slots = request.slots()
        sent = msgspec.json.encode(self._body(request, slots))
        answer = decode_answer(await self._post_generate(sent, turn), StockVLLMResponse)
        check_expansion(request.token_ids, slots, answer)
        response = GenerateResponse(request_id=answer.request_id, choices=answer.choices)
        return self._check_answer(request, response)

    async def lease(self, run: str, seconds: float) -> None:
        """A vLLM of its own knows no lease: the label of its weights shows who changed them."""

    async def wait_healthy(self) -> None:
        await self.wait_reachable("/health")  # its version is checked before the run

    async def adopt(self, manifest: str) -> None:
        """Returns when the server holds the published weights, under their version's name."""
        file = Path(manifest).absolute()
        label = read_manifest(file).label
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(file.parent)}}
        # Requests end first: one that is prefilled again would kill vLLM 0.32, which has let go
        # of its pixels.
        await self._post_command("/pause?mode=wait&clear_cache=true")
        try:
            await self._post_command("/collective_rpc", reload)
            await self._post_command("/reset_prefix_cache")
            await self._post_command("/reset_encoder_cache")
            await self._post_command("/update_weight_version", {"new_version": label})
        finally:
            await self._post_command("/resume")

    async def _post_command(self, path: str, body: dict[str, Any] | None = None) -> None:
        try:
            await self.request("POST", path, msgspec.json.encode(body or {}))
        except EngineError as error:
            if error.status != 404:
                raise
            raise EngineError(
                f"the vLLM at {self.base_url} has no {path.partition('?')[0]}",
                "start it with VLLM_SERVER_DEV_MODE=1, so that it can take new weights",
                kind="weights",
                status=404,
            ) from error

    def _body(self, request: GenerateRequest, slots: Sequence[Slot]) -> dict[str, Any]:
        params = request.sampling_params
        return {
            "token_ids": collapse_pads(request.token_ids, slots),
            "content_parts": [self._part(slot) for slot in slots] or None,
            "return_token_ids": True,
            "sampling_params": {
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": max(0, params.top_k),
                "min_p": params.min_p,
                "seed": params.seed,
                "stop_token_ids": list(params.stop_token_ids),
                "logprobs": params.logprobs,
                "n": params.n,
                "ignore_eos": True,
                "detokenize": False,
                "logit_bias": {str(token): BAN_BIAS for token in self.banned_token_ids},
            },
        }

    def _part(self, slot: Slot) -> dict[str, str]:
        ref = slot.item.ref
        if slot.item.step is not None:
            raise EngineError(
                "a video: it was not tried with vLLM",
                'set [inference] engine = "torch"',
                kind="slots",
            )
        if self.shares_store:
            url = self.store.path(ref.digest).absolute().as_uri()
        else:
            url = ref.data_url(self.store.get(ref))
        # vLLM keeps what it made of an image under the uuid.
        return {"type": "image_url", "url": url, "uuid": slot.item.key}


def collapse_pads(token_ids: Sequence[int], slots: Sequence[Slot]) -> list[int]:
    """The form from which an engine expands by itself."""
    short: list[int] = []
    done = 0
    for slot in slots:
        short += token_ids[done : slot.offset + 1]
        done = slot.end
    return [*short, *token_ids[done:]]


def check_expansion(token_ids: list[int], slots: Sequence[Slot], answer: StockVLLMResponse) -> None:
    """Raises, with both, unless vLLM expanded the prompt to our ids and places."""
    theirs = answer.prompt_token_ids
    if theirs != token_ids:
        pairs = zip(token_ids, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(token_ids), len(theirs)))
        near = slice(max(0, at - NUM_SHOWN_IDS), at + NUM_SHOWN_IDS)
        raise _expansion_error(
            f"{len(token_ids)} ids here, {len(theirs)} there; from {near.start} on ours are "
            f"{token_ids[near]}, theirs {theirs[near]}"
        )
    ours = [(slot.offset, slot.length) for slot in slots]
    places = [place for found in (answer.mm_placeholders or {}).values() for place in found]
    there = sorted((place.offset, place.length) for place in places)
    if there != ours:
        raise _expansion_error(f"images at {ours} here, at {there} there")


def _expansion_error(what: str) -> EngineError:
    # Not Misaligned, which costs one sample: every prompt of this server would differ.
    return EngineError(
        f"vLLM expanded the prompt in another way than the renderer: {what}",
        "serve the checkpoint that the renderer was loaded from, with the same pixel limits",
        kind="expansion",
        status=502,
    )
