"""Score the tokens of a trace on a live server, with the generate protocol."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.errors import EngineError, Misaligned
from sightline.rollout.client import GenerateClient
from sightline.view.trace_replay import PromptScores
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams


@dataclass(frozen=True)
class ServerPromptScorer:
    client: GenerateClient
    modality: str = "image"

    async def __call__(
        self, token_ids: list[int], slots: list[Slot], temperature: float
    ) -> PromptScores:
        # The protocol has no request that samples nothing. The sampled token is discarded.
        params = SamplingParams(max_tokens=1, temperature=temperature, seed=0, prompt_logprobs=0)
        response = await self.client.generate(
            GenerateRequest.of(token_ids, slots, params, self.modality)
        )
        entries, versions = response.prompt_logprobs, response.choices[0].weight_versions
        if entries is None or not versions:
            raise EngineError(
                "the server returned no prompt logprobs or no weight versions",
                "replay against a server started by `sightline serve`",
                kind="incomplete",
            )
        if len(entries) != len(token_ids) or any(
            entry is not None and token not in entry
            for token, entry in zip(token_ids, entries, strict=False)
        ):
            raise Misaligned(
                "the server's logprobs do not belong to the prompt's tokens",
                "see the server's log",
            )
        logprobs = [
            None if entry is None else entry[token].logprob
            for token, entry in zip(token_ids, entries, strict=True)
        ]
        digests = response.sightline.pixel_digests if response.sightline else [None] * len(slots)
        return PromptScores(logprobs, digests, versions[0].version)
