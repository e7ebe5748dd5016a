"""Logprob, entropy and KL of every trained token, without holding all logits at once.

Tokens go through the head in parts. If there are several, a part's logits are freed after the
forward pass and computed again in the backward pass: only numbers per token stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sightline.algo import losses
from sightline.algo.needs import Needs
from sightline.compute.logprobs import BannedIds, Hidden, Logits, Temperature, TokenIds, log_softmax
from sightline.families import Forward

MAX_LOGITS = 1 << 28
"""The number of logits in a part: 1 GiB in float32."""
_Scores = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores per trained token; None for those that the algorithm does not need."""

    logprobs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None
    kl: Float[Tensor, " tokens"] | None
    """KL to the reference."""
    reference_logprobs: Float[Tensor, " tokens"] | None

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenScores:
        """Apply `function` to the scores that exist."""
        others = (self.entropy, self.kl, self.reference_logprobs)
        return TokenScores(
            function(self.logprobs), *(None if x is None else function(x) for x in others)
        )


def score_tokens(
    models: tuple[Forward, Forward | None],
    hidden: tuple[Hidden, Hidden | None],
    tokens: TokenIds,
    banned: BannedIds,
    temperature: Temperature,
    needs: Needs,
    max_logits: int = MAX_LOGITS,
    backend: str = "",
) -> TokenScores:
    """Score `tokens`, predicted by `hidden`, with the model and the reference, if there is one.

    `backend` is a backend of torch.compile. An empty name compiles nothing.
    """
    forward, reference = models

    def score_part(hidden: Hidden, tokens: TokenIds, reference_hidden: Hidden | None) -> _Scores:
        logits, other = forward.logits(hidden), None
        if reference is not None and reference_hidden is not None:
            with torch.no_grad():
                other = reference.logits(reference_hidden)
        score = _score_logits if not backend else _compile_score(backend)
        return score(logits, tokens, other, banned, temperature, needs)

    # An empty input gives the head's width, whatever the family calls it.
    with torch.no_grad():
        width = forward.logits(hidden[0][:0]).shape[-1]
    rows = max(1, max_logits // width)
    score: Callable[..., _Scores] = score_part
    if len(hidden[0]) > rows:
        score = partial(checkpoint, score_part, use_reentrant=False, preserve_rng_state=False)
    references = repeat(None) if hidden[1] is None else hidden[1].split(rows)
    parts = list(map(score, hidden[0].split(rows), tokens.split(rows), references))
    logprobs, entropy, kl, reference_logprobs = map(torch.cat, zip(*parts, strict=True))
    return TokenScores(
        logprobs,
        entropy if needs.entropy or needs.entropy_gradient else None,
        kl if needs.exact_kl else None,
        reference_logprobs if needs.reference_logprobs else None,
    )


def _score_logits(
    logits: Logits,
    tokens: TokenIds,
    reference: Logits | None,
    banned: BannedIds,
    temperature: Temperature,
    needs: Needs,
) -> _Scores:
    """Return logprobs, entropy, KL and the reference's logprobs, empty if not needed."""
    log_p = log_softmax(logits, banned, temperature)
    logprobs = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    entropy = kl = reference_logprobs = logprobs.new_zeros(0)
    if needs.entropy_gradient:
        entropy = losses.entropy(log_p, banned)
    elif needs.entropy:
        entropy = losses.entropy(log_p.detach(), banned)
    if reference is not None:
        log_q = log_softmax(reference, banned, temperature)
        if needs.exact_kl:
            kl = losses.exact_kl(log_p, log_q, banned)
        if needs.reference_logprobs:
            reference_logprobs = log_q.gather(-1, tokens[:, None]).squeeze(-1)
    return logprobs, entropy, kl, reference_logprobs


@cache
def _compile_score(backend: str) -> Callable[..., _Scores]:
    """Compile the scoring, so that it does not pass over the logits once per operation."""
    return torch.compile(_score_logits, backend=backend)
