"""Logprobs of a prompt's own tokens, in the shape in which the generate protocol answers them."""

from __future__ import annotations

import numpy as np

from sightline.wire.generate import PromptLogprob

PromptLogprobs = list[dict[int, PromptLogprob] | None]


def build_prompt_logprobs(prompt: np.ndarray, logprobs: np.ndarray | None) -> PromptLogprobs | None:
    """One entry per token; None where there is no logprob, or none that JSON could hold."""
    if logprobs is None:
        return None
    return [
        {token: PromptLogprob(value)} if is_number else None
        for token, value, is_number in zip(
            prompt.tolist(), logprobs.tolist(), np.isfinite(logprobs).tolist(), strict=True
        )
    ]
