"""Score prompts on a server: the logprob of each token, without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sightline.errors import EngineError, Misaligned
from sightline.rollout.client import GenerateClient
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A server's scores for a prompt."""

    logprobs: Sequence[float | None]
    """One entry per token; None for tokens without a logprob."""
    pixel_digests: Sequence[str | None]
    """Pixel digest of each slot."""
    version: str
    """Version of the weights that computed the scores."""


@dataclass(frozen=True)
class ServerPromptScorer:
    """Scores tokens on a live server, with the generate protocol."""

    client: GenerateClient
    modality: str = "image"

    async def __call__(
        self, token_ids: list[int], slots: list[Slot], temperature: float
    ) -> PromptScores:
        # The protocol always samples at least one token, which is discarded.
        params = SamplingParams(max_tokens=1, temperature=temperature, seed=0, prompt_logprobs=0)
        request = GenerateRequest.of(token_ids, slots, params, self.modality)
        response = await self.client.generate(request)
        entries, versions = response.prompt_logprobs, response.choices[0].weight_versions
        if entries is None or not versions:
            raise EngineError(
                "the server returned no prompt logprobs or no weight versions",
                "use the embedded engine, which `sightline serve` starts",
                kind="incomplete",
            )
        if len(entries) != len(token_ids) or any(
            entry is not None and token not in entry
            for token, entry in zip(token_ids, entries, strict=False)
        ):
            raise Misaligned(
                "the server's logprobs do not belong to the prompt's tokens", "see the server's log"
            )
        logprobs = [
            None if entry is None else entry[token].logprob
            for token, entry in zip(token_ids, entries, strict=True)
        ]
        digests = response.sightline.pixel_digests if response.sightline else [None] * len(slots)
        return PromptScores(logprobs, digests, versions[0].version)
