"""The client of a vLLM without our plugin. vLLM's code makes the pixels, which nothing verifies.

A request has one pad per image and the address of its file. vLLM expands the pads and returns the
expanded ids, which must equal ours. Answers have no pixel digests, and the trainer refuses such
samples unless the run file allows them.

Weights are loaded with the routes of vLLM's development mode, after requests in flight have ended.
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
"""vLLM's lowest `logit_bias`, which bans the pads: it scales a probability by less than 1e-43."""
NUM_SHOWN_IDS = 8
"""Ids that an error shows on either side of a difference."""


class StockVLLMResponse(msgspec.Struct, frozen=True):
    """The fields of vLLM's answer that we read."""

    request_id: str
    choices: list[Choice]
    prompt_token_ids: list[int]
    """The prompt's ids after vLLM expanded it."""
    mm_placeholders: dict[str, list[Placeholder]] | None = None


@dataclass(kw_only=True)
class StockVLLMClient(GenerateClient):
    """The client of one vLLM server without our plugin."""

    store: MediaStore
    shares_store: bool = True
    """Whether the server can read the store (`--allowed-local-media-path`). If not, images are sent
    as data URLs."""

    async def generate(self, request: GenerateRequest, turn: Stage = NO_STAGE) -> GenerateResponse:
        slots = request.slots()
        sent = msgspec.json.encode(self._body(request, slots))
        answer = decode_answer(await self._post_generate(sent, turn), StockVLLMResponse)
        check_expansion(request.token_ids, slots, answer)
        response = GenerateResponse(request_id=answer.request_id, choices=answer.choices)
        return self._check_answer(request, response)

    async def lease(self, run: str, seconds: float) -> None:
        """Do nothing: this vLLM has no leases. The label of its weights shows who changed them."""

    async def wait_healthy(self) -> None:
        await self.wait_reachable("/health")  # checks before the run compare its version

    async def adopt(self, manifest: str) -> None:
        """Load the published weights, and return when the server uses them."""
        file = Path(manifest).absolute()
        label = read_manifest(file).label
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(file.parent)}}
        # Requests end first: vLLM 0.32 has dropped their pixels, and would crash if it had to
        # prefill them again.
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
                f"the vLLM at {self.base_url} has no route {path.partition('?')[0]}",
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
                "videos are not supported with vLLM",
                'set [inference] engine = "torch"',
                kind="slots",
            )
        if self.shares_store:
            url = self.store.path(ref.digest).absolute().as_uri()
        else:
            url = ref.data_url(self.store.get(ref))
        # vLLM caches the processed image under the uuid.
        return {"type": "image_url", "url": url, "uuid": slot.item.key}


def collapse_pads(token_ids: Sequence[int], slots: Sequence[Slot]) -> list[int]:
    """Return the ids with one pad per image, which vLLM expands."""
    short: list[int] = []
    done = 0
    for slot in slots:
        short += token_ids[done : slot.offset + 1]
        done = slot.end
    return [*short, *token_ids[done:]]


def check_expansion(token_ids: list[int], slots: Sequence[Slot], answer: StockVLLMResponse) -> None:
    """Raise unless vLLM expanded the prompt to our ids and slots."""
    theirs = answer.prompt_token_ids
    if theirs != token_ids:
        pairs = zip(token_ids, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(token_ids), len(theirs)))
        near = slice(max(0, at - NUM_SHOWN_IDS), at + NUM_SHOWN_IDS)
        raise _expansion_error(
            f"we have {len(token_ids)} ids, vLLM {len(theirs)}; from {near.start} on, ours are "
            f"{token_ids[near]}, vLLM's {theirs[near]}"
        )
    ours = [(slot.offset, slot.length) for slot in slots]
    places = [place for listed in (answer.mm_placeholders or {}).values() for place in listed]
    there = sorted((place.offset, place.length) for place in places)
    if there != ours:
        raise _expansion_error(f"our images are at {ours}, vLLM's at {there}")


def _expansion_error(what: str) -> EngineError:
    # Not Misaligned, which drops one sample: every prompt of this server would differ.
    return EngineError(
        f"vLLM expanded the prompt differently from the renderer: {what}",
        "serve the checkpoint that the renderer was loaded from, with the same pixel limits",
        kind="expansion",
        status=502,
    )
