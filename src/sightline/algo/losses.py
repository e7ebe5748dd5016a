"""Policy losses, in the notation of their papers.

A loss takes `LossInputs` and returns a `LossOutput`: the loss of every trained token, and which of
them were clipped. `[algorithm] loss` chooses it, with keyword arguments from `loss_args`. The
algorithm adds its KL and entropy terms, and the learner weights the tokens.

Letters: S trained tokens, V vocabulary; pi the trainer's policy, mu the sampler's, r = pi / mu the
importance ratio of a token, A its advantage, sg a value without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.algo.needs import Needs
from sightline.algo.registry import load_function, try_function
from sightline.compute.logprobs import BannedIds, Logits, mask_banned
from sightline.errors import ConfigError
from sightline.wire.event import STEP_METRICS
from sightline.wire.micro_batch import TokenOrigin

PerToken = Float[Tensor, " tokens"]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one micro-batch, sequence by sequence."""

    logprobs: PerToken
    """log pi of each token, with its gradient."""
    sampler_logprobs: PerToken
    """log mu of each token, as reported by the inference engine."""
    advantages: PerToken
    sequence_ids: Int[Tensor, " tokens"]
    """The model call that sampled each token, counted from 0 in the micro-batch."""
    origins: Sequence[TokenOrigin] = ()
    """The trace and node of each model call, for `segment_ids`."""
    # The fields below are None unless the algorithm's `needs` declare them.
    reference_logprobs: PerToken | None = None
    """log ref of each token, where ref is the run's initial checkpoint."""
    kl: PerToken | None = None
    """KL(pi || ref) over the whole vocabulary, with its gradient."""
    entropy: PerToken | None = None
    """Entropy of pi over the whole vocabulary, with a gradient if one is declared."""
    old_logprobs: PerToken | None = None
    """log pi of each token before the first update of the step."""
    values: PerToken | None = None
    """The value head's values, with their gradient."""
    old_values: PerToken | None = None
    """The value head's values before the first update of the step."""
    teacher_logprobs: PerToken | None = None

    def importance_ratios(self) -> PerToken:
        """r = pi / mu of each token, with its gradient."""
        return torch.exp(self.logprobs - self.sampler_logprobs)

    def segment_ids(
        self, kind: Literal["turn", "sample", "rollout", "group"]
    ) -> Int[Tensor, " tokens"]:
        """Number the turn (in its rollout), sample, rollout or group of each token, from 0."""
        numbers = [o.turn if kind == "turn" else o.sample for o in self.origins]
        if kind in ("rollout", "group"):
            names = [o.trace_id if kind == "rollout" else o.group_id for o in self.origins]
            places = {name: place for place, name in enumerate(dict.fromkeys(names))}
            numbers = [places[name] for name in names]
        lengths = [origin.stop - origin.start for origin in self.origins]
        return (
            torch.tensor(numbers, dtype=torch.long)
            .repeat_interleave(torch.tensor(lengths, dtype=torch.long))
            .to(self.logprobs.device)
        )


class LossOutput(NamedTuple):
    token_loss: PerToken
    """The loss of each trained token, before aggregation weights."""
    clipped: PerToken
    """1 if clipping changed the token's loss, else 0. The mean is `clip_fraction`."""


LossFunction = Callable[[LossInputs], LossOutput]


def ppo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutput:
    """-min(r A, clip(r, 1-low, 1+high) A): clipped by token, with a higher upper bound (DAPO)."""
    return _clipped(inputs.importance_ratios(), inputs.advantages, clip_low, clip_high)


def cispo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutput:
    """-sg(clip(r, 1-low, 1+high)) A log pi: clipped tokens still have a gradient."""
    r = inputs.importance_ratios().detach()
    return _weighted(inputs, r, torch.clamp(r, 1 - clip_low, 1 + clip_high))


Level = Literal["token", "turn", "sample"]


def tis(inputs: LossInputs, *, ratio_cap: float = 2.0, level: Level = "token") -> LossOutput:
    """-sg(min(r, C)) A log pi: importance sampling from mu, with its weights truncated at C.

    At level "turn" or "sample", r is the product of the ratios of the turn's or sample's tokens.
    """
    r = _ratios_at(inputs, inputs.logprobs, level)
    return _weighted(inputs, r, torch.clamp(r, max=ratio_cap))


def mis(
    inputs: LossInputs, *, low: float = 0.5, high: float = 2.0, level: Level = "token"
) -> LossOutput:
    """-sg(r if low <= r <= high else 0) A log pi: tokens far from the sampler get no gradient.

    `level` is that of `tis`.
    """
    r = _ratios_at(inputs, inputs.logprobs, level)
    return _weighted(inputs, r, torch.where((low <= r) & (r <= high), r, 0.0))


def _ratios_at(inputs: LossInputs, logprobs: PerToken, level: Level) -> PerToken:
    """Return ratios to mu without a gradient: by token, or the product over its turn or sample."""
    log_r = (logprobs - inputs.sampler_logprobs).detach()
    if level == "token":
        return torch.exp(log_r)
    if level not in ("turn", "sample"):
        raise ConfigError(
            f'[algorithm] loss_args: level = {level!r} is not "token", "turn" or "sample"',
            "choose one of the three",
        )
    ids = inputs.sequence_ids if level == "turn" else inputs.segment_ids("sample")
    return torch.exp(_sum_by(ids, log_r))


def _sum_by(ids: Int[Tensor, " tokens"], values: PerToken) -> PerToken:
    """Return for each token the sum over all tokens with its id."""
    # One slot per token is enough. Counting sequences would make the host wait for the device.
    return torch.zeros_like(values).index_add(0, ids, values)[ids]


def _weighted(inputs: LossInputs, r: PerToken, weight: PerToken) -> LossOutput:
    return LossOutput(-weight * inputs.advantages * inputs.logprobs, (weight != r).float())


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """-min(s A, clip(s, 1-low, 1+high) A) with s of a whole sequence, (prod r) ** (1 / length).

    The gradient of s goes to each of its tokens: s_t = sg(s) pi / sg(pi). The bounds are much
    smaller than those of `ppo`, since s is a geometric mean.
    """
    ids = inputs.sequence_ids
    log_r = (inputs.logprobs - inputs.sampler_logprobs).detach()
    log_s = _sum_by(ids, log_r) / _sum_by(ids, torch.ones_like(log_r))
    s = torch.exp(log_s + inputs.logprobs - inputs.logprobs.detach())
    return _clipped(s, inputs.advantages, clip_low, clip_high)


def sapo(
    inputs: LossInputs, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> LossOutput:
    """-(4 / T) sigmoid(T (r - 1)) A: a smooth gate in place of clipping, with T by the sign of A.

    The gradient is largest at r = 1. Tokens count as clipped if the gate halves it.
    """
    a = inputs.advantages
    t = torch.where(a > 0, temperature_positive, temperature_negative)
    gate = torch.sigmoid(t * (inputs.importance_ratios() - 1))
    halved = (4 * gate * (1 - gate) < 0.5).detach().float()
    return LossOutput(-4 / t * gate * a, halved)


def _clipped(ratios: PerToken, advantages: PerToken, low: float, high: float) -> LossOutput:
    plain = ratios * advantages
    clipped = torch.clamp(ratios, 1 - low, 1 + high) * advantages
    return LossOutput(-torch.minimum(plain, clipped), (clipped < plain).float())


LOSSES: dict[str, LossFunction] = {
    "ppo": ppo, "cispo": cispo, "gspo": gspo, "sapo": sapo, "tis": tis, "mis": mis,
}  # fmt: skip


def correct(
    loss: LossFunction,
    inputs: LossInputs,
    *,
    correction: Literal["tis", "mis"],
    correction_cap: float = 2.0,
    correction_level: Level = "token",
) -> LossOutput:
    """Apply a loss with r = pi / old, times the correction for old / mu (decoupled PPO).

    old is the policy before the first update. The weight w = old / mu is min(w, C) with "tis", and
    w if 1 / C <= w <= C else 0 with "mis".
    """
    if correction not in ("tis", "mis") or correction_cap < 1:
        raise ConfigError(
            f"[algorithm] loss_args: correction = {correction!r} with a cap of {correction_cap}",
            'choose "tis" or "mis", with a correction_cap of at least 1',
        )
    assert inputs.old_logprobs is not None  # as `needs` declare
    w = _ratios_at(inputs, inputs.old_logprobs, correction_level)
    truncated = w.clamp(max=correction_cap)
    is_dropped = (correction == "mis") & ((w != truncated) | (w < 1 / correction_cap))
    advantages = inputs.advantages * truncated.masked_fill(is_dropped, 0.0)
    return loss(replace(inputs, sampler_logprobs=inputs.old_logprobs, advantages=advantages))


def exact_kl(log_p: Logits, log_q: Logits, banned: BannedIds) -> PerToken:
    """KL(p || q) over the whole vocabulary. Banned ids have no mass in either."""
    difference = mask_banned(log_p - log_q, banned, 0.0)
    return (log_p.exp() * difference).sum(-1)


def estimate_kl(logprobs: PerToken, reference_logprobs: PerToken, name: str) -> PerToken:
    """Estimate KL(pi || ref) from sampled tokens, with d = log ref - log pi.

    k2 is d^2 / 2: biased, but its gradient is that of the KL. k3 is exp(d) - 1 - d: unbiased and
    never negative. k1 = -d is not a loss, since its expected gradient is 0.
    """
    d = reference_logprobs - logprobs
    return d.square() / 2 if name == "k2" else torch.expm1(d) - d


def entropy(log_p: Logits, banned: BannedIds) -> PerToken:
    """-sum p log p over the whole vocabulary, without the banned ids."""
    return -(log_p.exp() * mask_banned(log_p, banned, 0.0)).sum(-1)


def mismatch_kl(logprobs: PerToken, sampler_logprobs: PerToken) -> PerToken:
    """Estimate KL(sampler || trainer) at each sampled token: r - 1 - log r, never negative."""
    log_r = (logprobs - sampler_logprobs).double()
    return torch.expm1(log_r) - log_r


class LinearValues(torch.nn.Linear):
    """A value head: one linear layer, which starts at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> PerToken:
        return super().forward(hidden).squeeze(-1)


def load_loss(name: str, args: Mapping[str, Any] | None = None) -> LossFunction:
    """Load a run's policy loss. One from outside the package is tested on a few tokens first."""
    setting = "[algorithm] loss"
    own = dict(args or {})
    shared = {key: own.pop(key) for key in list(own) if key.startswith("correction")}
    function = load_function(setting, name, LOSSES, own, ("inputs",))
    if shared:  # works with every loss
        corrected = {name: partial(correct, function)}
        function = load_function(setting, name, corrected, shared, ("inputs",))
    for num in (6, 0) if args or name not in LOSSES else ():
        inputs = _build_small_inputs(num, Needs(old_logprobs=True))
        output = try_function(setting, name, function, inputs)
        shapes = isinstance(output, tuple) and [getattr(x, "shape", None) for x in output]
        if shapes != [(num,)] * 2:
            raise ConfigError(
                f"{setting} = {name!r} returned {output!r} for {num} tokens",
                f"return LossOutput(token_loss, clipped), two tensors of shape ({num},). A "
                "micro-batch may hold no trained token",
            )
        _check_token_loss(setting, name, inputs, output[0])
    return function


def check_algorithm_loss(name: str, loss: Callable[[LossInputs], Any], needs: Needs) -> None:
    """Raise if an algorithm's loss fails on a few tokens."""
    setting = "[algorithm] name"
    for num in (6, 0):
        inputs = _build_small_inputs(num, needs)
        output = try_function(setting, name, loss, inputs)
        is_pair = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict)
        tensors = [output[0], *output[1].values()] if is_pair else []
        if not tensors or {getattr(x, "shape", None) for x in tensors} != {(num,)}:
            raise ConfigError(
                f"{setting} = {name!r}: its loss returned {output!r} for {num} tokens",
                "return AlgorithmLoss(token_loss, metrics): a tensor of shape "
                f"({num},), and a dict of tensors of this shape",
            )
        if taken := [name for name in output[1] if name.partition(".")[0] in STEP_METRICS]:
            raise ConfigError(
                f"{setting} = {name!r}: its loss returned the metrics {taken}, which every run has",
                "give them other names",
            )
        _check_token_loss(setting, name, inputs, output[0])


def _build_small_inputs(num: int, needs: Needs) -> LossInputs:
    """Return a few tokens of one rollout, with everything that `needs` declare."""
    logprobs = torch.linspace(-2.0, -0.5, num, requires_grad=True)
    other, positive = logprobs.detach() - 0.2, torch.linspace(0.1, 1.0, num)
    return LossInputs(
        logprobs,
        logprobs.detach() - 0.1,
        torch.linspace(-1.0, 1.0, num),
        torch.arange(num) // 3,
        [TokenOrigin(i, i + 3, node=i, trace_id="trial") for i in range(0, num, 3)],
        reference_logprobs=other if needs.reference_logprobs else None,
        kl=positive + 0.0 * logprobs if needs.exact_kl else None,
        entropy=positive + 0.0 * logprobs if needs.entropy or needs.entropy_gradient else None,
        old_logprobs=other if needs.old_logprobs else None,
        values=positive + 0.0 * logprobs if needs.values else None,
        old_values=positive if needs.values else None,
        teacher_logprobs=other if needs.teacher_logprobs else None,
    )


def _check_token_loss(setting: str, name: str, inputs: LossInputs, token_loss: Tensor) -> None:
    if not token_loss.requires_grad:
        raise ConfigError(
            f"the result of {setting} = {name!r} has no gradient",
            "compute it from the logprobs of its argument, without detach(), .item() or numpy",
        )
    [gradient] = torch.autograd.grad(token_loss.sum(), inputs.logprobs)
    if not (torch.isfinite(token_loss).all() and torch.isfinite(gradient).all()):
        raise ConfigError(
            f"{setting} = {name!r} is not finite on ordinary tokens: {token_loss.tolist()}",
            "look for a division by zero or a logarithm of it",
        )
