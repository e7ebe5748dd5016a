"""The quantities that an algorithm can request. The trainer computes no others."""

from __future__ import annotations

from typing import NamedTuple


class Needs(NamedTuple):
    """The quantities that the trainer computes for an algorithm."""

    reference_logprobs: bool = False
    """Logprobs of the trained tokens under the run's first checkpoint."""
    exact_kl: bool = False
    """KL to the run's first checkpoint over the whole vocabulary, with its gradient."""
    entropy: bool = False
    """The policy's entropy at each trained token, as a number."""
    entropy_gradient: bool = False
    """The policy's entropy at each trained token, with its gradient."""
    old_logprobs: bool = False
    """The policy's logprobs of the trained tokens before the first update of the step."""
    values: bool = False
    """Values of the trained tokens, from the algorithm's value head."""
    teacher_logprobs: bool = False
    """Logprobs of the trained tokens under `[algorithm] teacher`. If it is unset, under the run's
    first checkpoint."""
    turn_rewards: bool = False
    """A reward for every turn. Truncated rollouts without them are dropped."""

    @property
    def reference(self) -> bool:
        """Return whether the trainer has to load the first checkpoint."""
        return self.reference_logprobs or self.exact_kl
