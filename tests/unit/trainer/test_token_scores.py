"""Scoring in parts equals scoring at once, and keeps no logits in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sightline.algo.needs import Needs
from sightline.compute.model import load_model
from sightline.families import Forward, load_family
from sightline.trainer.token_scores import score_tokens

NUM = 37
BANNED = torch.tensor([5, 9])
Models = tuple[Forward, Forward]
NEEDS = Needs(entropy=True, exact_kl=True)


@pytest.fixture
def models(tiny_model: Path) -> Models:
    family = load_family(tiny_model)
    forward, reference = (load_model(tiny_model, family, "cpu", "float32") for _ in range(2))
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter += 0.01
    return forward, reference


def scored(models: Models, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Figures, gradients, and the numbers as wide as the vocabulary that autograd kept."""
    torch.manual_seed(0)
    head = models[0].model.lm_head.weight  # type: ignore[union-attr]
    width = len(head)
    hidden = torch.randn(NUM, head.shape[1], requires_grad=True)  # type: ignore[arg-type]
    other = torch.randn(NUM, head.shape[1])  # type: ignore[arg-type]
    tokens = torch.randint(10, width, (NUM,))
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.ndim == 2 and tensor.shape[-1] == width else 0
        return tensor

    head.grad = None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = score_tokens(
            models, (hidden, other), tokens, BANNED, 0.7, NEEDS, max_logits=rows * width
        )
    assert scores.kl is not None
    (scores.logprobs.sum() + 0.3 * scores.kl.square().sum()).backward()
    assert scores.entropy is not None
    figures = [scores.logprobs.detach(), scores.entropy, scores.kl.detach()]
    return figures, [hidden.grad, head.grad.clone()], kept  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [1, 8, NUM - 1])
def test_chunked_scores_and_gradients_match_the_whole(models: Models, rows: int) -> None:
    whole, whole_grads, _ = scored(models, NUM)
    parts, part_grads, _ = scored(models, rows)
    for a, b in zip((*whole, *whole_grads), (*parts, *part_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_logits_are_kept_between_the_passes(models: Models) -> None:
    *_, whole = scored(models, NUM)
    *_, parts = scored(models, 8)
    assert whole > 0 and parts == 0


@pytest.mark.parametrize("rows", [NUM, 8])
def test_entropy_bonus_has_the_gradient_of_the_entropy(models: Models, rows: int) -> None:
    """Compare with -sum p log p, written with other functions of torch, without banned ids."""
    torch.manual_seed(0)
    weight = models[0].model.lm_head.weight.detach()  # type: ignore[union-attr, operator]
    hidden = torch.randn(NUM, weight.shape[1], requires_grad=True)
    tokens, needs = torch.arange(10, 10 + NUM), Needs(entropy_gradient=True)
    size = rows * len(weight)
    scores = score_tokens((models[0], None), (hidden, None), tokens, BANNED, 0.7, needs, size)
    assert scores.entropy is not None
    allowed = torch.tensor([i not in BANNED for i in range(len(weight))])
    wanted = torch.distributions.Categorical(logits=(hidden @ weight[allowed].T) / 0.7).entropy()
    torch.testing.assert_close(scores.entropy, wanted)
    [gradient] = torch.autograd.grad(scores.entropy.sum(), hidden)
    assert gradient.norm() > 0.1
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), hidden)[0])


def test_scores_do_not_depend_on_measuring_entropy(models: Models) -> None:
    torch.manual_seed(0)
    width = models[0].model.lm_head.weight.shape[1]  # type: ignore[union-attr]
    hidden, other = torch.randn(2, NUM, width)  # type: ignore[arg-type]
    tokens = torch.arange(10, 10 + NUM)
    whole, less = (
        score_tokens(models, (hidden, other), tokens, BANNED, 0.7, needs)
        for needs in (NEEDS, Needs(exact_kl=True))
    )
    assert whole.entropy is not None and less.entropy is None
    assert torch.equal(whole.logprobs, less.logprobs)
    assert whole.kl is not None and less.kl is not None and torch.equal(whole.kl, less.kl)
