"""A request in vLLM: converts its parameters to vLLM's form, and vLLM's output to ours."""

from __future__ import annotations

import asyncio
from bisect import bisect
from dataclasses import dataclass
from typing import Any

from sightline.inference.engine import EngineRequest
from sightline.inference.vllm_plugin import BANNED_IDS_KEY
from sightline.inference.vllm_plugin.symbols import RequestOutputKind
from sightline.inference.vllm_plugin.symbols import SamplingParams as VllmParams
from sightline.wire.generate import SamplingParams, VersionSpan

MAX_VLLM_SEED = 2**63
"""vLLM's seeds are below this, so ours are taken modulo it."""


@dataclass(slots=True, eq=False)
class VllmRequest(EngineRequest):
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    """Whether vLLM has the request."""
    submitted_at: float = 0.0
    """When vLLM got the request, on the monotonic clock, as the next two."""
    scheduled_at: float = 0.0
    """When vLLM started to compute the request."""
    first_token_at: float = 0.0

    def count_tokens_on_old_kv(self, updates: list[float]) -> int:
        """Return the number of tokens sampled with a KV cache of older weights.

        `updates` are the times at which weights changed. Cached tokens belong to the weights at
        submission.
        """
        if not self.spans:
            return 0
        began_at = self.submitted_at if self.cached_tokens else self.scheduled_at
        is_old = bisect(updates, began_at) < bisect(updates, self.first_token_at)
        return len(self.tokens) - (0 if is_old else self.spans[0].end)


def to_vllm_params(params: SamplingParams, seed: int | None) -> VllmParams:
    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=None if seed is None else seed % MAX_VLLM_SEED,
        stop_token_ids=list(params.stop_token_ids),
        # Only the request's stop ids end an answer, not those of the checkpoint.
        ignore_eos=True,
        max_tokens=params.max_tokens,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        extra_args={BANNED_IDS_KEY: list(params.banned_token_ids)}
        if params.banned_token_ids
        else None,
    )


def read_output(request: VllmRequest, final: Any) -> None:
    output = final.outputs[0]
    request.tokens = list(output.token_ids)
    request.logprobs = [
        entry[token].logprob
        for token, entry in zip(request.tokens, output.logprobs or [], strict=True)
    ]
    request.spans = [
        VersionSpan(span.version, span.start, span.end) for span in output.weight_versions or []
    ]
    request.finish_reason = output.finish_reason
    request.cached_tokens = final.num_cached_tokens or 0
    request.scheduled_at = final.metrics.scheduled_ts
    request.first_token_at = final.metrics.first_token_ts
