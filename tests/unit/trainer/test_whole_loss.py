"""The loss of a whole batch, packed, against plain loops in float64 over transformers' own model.

The reference shares only the pixels with our code: one sample at a time, no packing, no chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch

from sightline.algo.credit import AggregationFunction
from sightline.algo.registry import load_aggregation
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire.sample import Batch, Sample

SCALE = 1.05
"""The distance of the policy from its reference, because a KL of 0 proves nothing."""
KL_WEIGHT, LOW, HIGH, CAP = 0.3, 0.2, 0.28, 1.5
CLIP = {"clip_low": LOW, "clip_high": HIGH}
LOSS_ARGS = {"ppo": CLIP, "cispo": CLIP, "gspo": CLIP, "tis": {"ratio_cap": CAP}}


@dataclass
class Plain:
    """The results of transformers for one sample, in float64."""

    sample: Sample
    logprobs: np.ndarray
    kl: np.ndarray
    """The KL of each trained token to the reference that sees the images."""
    kl_blind: np.ndarray
    """The KL to the reference without the images."""


@pytest.fixture(scope="module")
def drawn(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MediaStore, list[Plain]]:
    from transformers import AutoModelForImageTextToText

    store = MediaStore(tmp_path_factory.mktemp("media"))
    samples = making.samples(tiny_model, store, count=6, seed=11)
    assert any(sample.slots for sample in samples)
    learner = learner_of(tiny_model, store, "ppo")
    policy, reference = (
        AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float64)
        for _ in range(2)
    )
    move(policy)
    return store, [score(policy, reference, sample, learner, store) for sample in samples]


def learner_of(model: Path, store: MediaStore, loss: str) -> Learner:
    algorithm = making.algorithm(kl_coef=KL_WEIGHT, loss=loss, loss_args=LOSS_ARGS[loss])
    config = making.model_config(model), making.trainer_config()
    learner = making.build_learner(*config, store, steps=10, algorithm=algorithm)
    move(learner.forward.model)
    return learner


def move(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SCALE)


def score(
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    sample: Sample,
    learner: Learner,
    store: MediaStore,
) -> Plain:
    trained = sample.trained.numpy()
    log_p, log_q = (log_softmax(m, sample, learner, store) for m in (policy, reference))
    log_blind = log_softmax(reference, sample, learner, store, blind=True)
    ids = sample.token_ids.numpy()[trained]

    def kl(of: np.ndarray) -> np.ndarray:
        allowed = [i for i in range(log_p.shape[1]) if i not in learner.pad_ids]
        return np.array(
            [
                sum(math.exp(p[i]) * (p[i] - q[i]) for i in allowed)
                for p, q in zip(log_p, of, strict=True)
            ]
        )

    return Plain(sample, log_p[np.arange(len(ids)), ids], kl(log_q), kl(log_blind))


def log_softmax(
    model: torch.nn.Module,
    sample: Sample,
    learner: Learner,
    store: MediaStore,
    blind: bool = False,
) -> np.ndarray:
    """(S, V), of the positions that predict the trained tokens."""
    ids = torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None]
    inputs: dict[str, torch.Tensor] = {"input_ids": ids}
    if sample.slots:
        family: Any = learner.family
        items = [sample.items[slot.item] for slot in sample.slots]
        rows = [family.rows(family.patches(store.image(i.ref), i)) for i in items]
        pixels = torch.from_numpy(np.concatenate(rows)).double()
        inputs["pixel_values"] = torch.zeros_like(pixels) if blind else pixels
        inputs["image_grid_thw"] = torch.tensor([i.grid for i in items])
        inputs["mm_token_type_ids"] = torch.isin(ids, torch.tensor(family.slot_token_ids)).int()
    with torch.no_grad():
        logits = model(**inputs).logits[0].double()
    logits[:, list(learner.pad_ids)] = float("-inf")
    rows_of = torch.from_numpy(sample.trained.numpy().astype(np.int64)) - 1
    logprobs: np.ndarray = torch.log_softmax(logits[rows_of], dim=-1).numpy()
    return logprobs


def naive_losses(plain: Plain, loss: str) -> list[float]:
    """-J of each trained token, as the papers write it, without the KL."""
    losses = []
    new, old = plain.logprobs, plain.sample.logprobs.numpy().astype(np.float64)
    advantages = plain.sample.advantages.numpy().astype(np.float64)
    at = 0
    for segment in plain.sample.segments:
        own = range(at, at + segment.stop - segment.start)
        at = own.stop
        s = math.exp(sum(new[i] - old[i] for i in own) / len(own))
        for i in own:
            r, a = math.exp(new[i] - old[i]), advantages[i]
            if loss == "gspo":
                r = s
            clipped = min(max(r, 1 - LOW), 1 + HIGH)
            if loss in ("ppo", "gspo"):
                losses.append(-min(r * a, clipped * a))
            elif loss == "cispo":
                losses.append(-clipped * a * new[i])
            else:
                losses.append(-min(r, CAP) * a * new[i])
    return losses


def taken(
    learner: Learner, store: MediaStore, plain: list[Plain], aggregation: AggregationFunction
) -> float:
    """Return the learner's loss over several packs."""
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(
        MicroBatchPixels(materializer), PackSize(160, 4096), aggregation=aggregation
    )
    ready = preparer.prepare(Batch(1, [naive.sample for naive in plain]), digest="")
    assert len(ready.micro_batches) > 1
    loss = learner.step(ready).metrics["loss"]
    assert loss is not None
    return loss


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "tis"])
def test_batch_loss_matches_plain_loops_in_float64(
    tiny_model: Path, drawn: tuple[MediaStore, list[Plain]], loss: str
) -> None:
    store, plain = drawn
    total = sum(len(naive.logprobs) for naive in plain)
    want = blind = 0.0
    for naive in plain:
        policy = naive_losses(naive, loss)
        want += sum(p + KL_WEIGHT * k for p, k in zip(policy, naive.kl, strict=True)) / total
        blind += sum(p + KL_WEIGHT * k for p, k in zip(policy, naive.kl_blind, strict=True)) / total
    loss_values = taken(
        learner_of(tiny_model, store, loss), store, plain, load_aggregation("tokens")
    )
    assert loss_values == pytest.approx(want, rel=2e-5)
    assert abs(loss_values - blind) > 100 * abs(loss_values - want), (
        "a reference without images is another"
    )


@pytest.mark.parametrize("by", ["samples", "constant"])
def test_other_averages_match_plain_loops(
    tiny_model: Path, drawn: tuple[MediaStore, list[Plain]], by: str
) -> None:
    store, plain = drawn
    want = 0.0
    for naive in plain:
        weight = 1 / (len(plain) * (7.0 if by == "constant" else len(naive.logprobs)))
        policy = naive_losses(naive, "ppo")
        want += weight * sum(p + KL_WEIGHT * k for p, k in zip(policy, naive.kl, strict=True))
    args = {"divisor": 7.0} if by == "constant" else {}
    average = load_aggregation(by, args)
    loss_values = taken(learner_of(tiny_model, store, "ppo"), store, plain, average)
    assert loss_values == pytest.approx(want, rel=2e-5)
