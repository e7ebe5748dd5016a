"""Logprob, entropy and KL of every token that trains, without holding all logits at once.

Tokens go through the head in parts. Where there is more than one, a part's logits are let go
after the forward pass and made again in the backward pass: what stays is a number a token.
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
from sightline.compute.logprobs import (
    BannedIds,
    Hidden,
    Logits,
    Temperature,
    TokenIds,
    log_softmax,
)
from sightline.families import Forward

MAX_LOGITS = 1 << 28
"""Logits that a part may hold: 1 GiB in float32."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    logprobs: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"] | None
    """Without a gradient; None where it is not measured."""
    kl: Float[Tensor, " tokens"] | None
    """KL to the reference; None without one."""


@dataclass(frozen=True, slots=True)
class TokenScorer:
    forward: Forward
    reference: Forward | None
    banned: BannedIds
    temperature: Temperature
    with_entropy: bool = True
    max_logits: int = MAX_LOGITS
    backend: str = ""
    """Backend of torch.compile; empty where nothing is compiled."""

    def score(
        self, hidden: Hidden, tokens: TokenIds, reference_hidden: Hidden | None
    ) -> TokenScores:
        """Scores of `tokens`, predicted by `hidden` and the reference's, if given."""
        # No rows: the head says how wide it is, whatever the family calls it.
        with torch.no_grad():
            width = self.forward.logits(hidden[:0]).shape[-1]
        rows = max(1, self.max_logits // width)
        score: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._part
        if len(hidden) > rows:
            score = partial(checkpoint, self._part, use_reentrant=False, preserve_rng_state=False)
        referred = repeat(None) if reference_hidden is None else reference_hidden.split(rows)
        parts = list(map(score, hidden.split(rows), tokens.split(rows), referred))
        logprobs, entropy, kl = (torch.cat(found) for found in zip(*parts, strict=True))
        return TokenScores(
            logprobs,
            entropy.detach() if self.with_entropy else None,
            kl if self.reference is not None else None,
        )

    def _part(
        self, hidden: Tensor, tokens: Tensor, reference_hidden: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.forward.logits(hidden)
        reference = None
        if self.reference is not None and reference_hidden is not None:
            with torch.no_grad():
                reference = self.reference.logits(reference_hidden)
        score = _score_logits if not self.backend else _compile_score(self.backend)
        return score(logits, tokens, reference, self.banned, self.temperature, self.with_entropy)


def _score_logits(
    logits: Logits,
    tokens: TokenIds,
    reference: Logits | None,
    banned: BannedIds,
    temperature: Temperature,
    with_entropy: bool,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " measured"], Float[Tensor, " compared"]]:
    """Logprobs, entropy and KL; of the last two nothing, where they are not wanted."""
    log_p = log_softmax(logits, banned, temperature)
    logprobs = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    entropy = kl = logprobs.new_zeros(0)
    if with_entropy:
        entropy = losses.entropy(log_p.detach(), banned)
    if reference is not None:
        kl = losses.exact_kl(log_p, log_softmax(reference, banned, temperature), banned)
    return logprobs, entropy, kl


@cache
def _compile_score(backend: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A pass or two over the logits, where each operation by itself would be one."""
    return torch.compile(_score_logits, backend=backend)
