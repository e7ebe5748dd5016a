"""Sampling parameters into vLLM's, and its output into ours."""

from __future__ import annotations

from typing import Any

from sightline.inference.vllm_plugin.names import BANNED_IDS_KEY
from sightline.inference.vllm_plugin.request import VllmRequest
from sightline.inference.vllm_plugin.symbols import RequestOutputKind
from sightline.inference.vllm_plugin.symbols import SamplingParams as VllmParams
from sightline.wire.generate import SamplingParams, VersionSpan

MAX_VLLM_SEED = 2**63


def to_vllm_params(params: SamplingParams, seed: int | None) -> VllmParams:
    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=None if seed is None else seed % MAX_VLLM_SEED,
        stop_token_ids=list(params.stop_token_ids),
        # Only what the request names may end an answer, not what the checkpoint adds to it.
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
