"""Packed equals unpacked, tree equals flat, and an image encoded once equals one encoded twice."""

from __future__ import annotations

from pathlib import Path

import making
import msgspec
import numpy as np
import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Phi3Config

from sightline.compute.attention import PackedPattern, TreePattern, build_attention_pattern
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.step_result import MetricSums
from sightline.wire.sample import Batch, Sample
from tests.contract.cases.anyvlm import write_kind

WHOLE = PackSize(1 << 20, 1 << 20)
ALONE = PackSize(1, 1)


@pytest.fixture
def learner(tiny_model: Path, store: MediaStore) -> Learner:
    algorithm = making.algorithm(kl_coef=0.1)
    config = making.model_config(tiny_model), making.trainer_config()
    return making.build_learner(*config, store, steps=10, algorithm=algorithm)


def ready(
    learner: Learner, store: MediaStore, samples: list[Sample], limit: PackSize
) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), limit)
    return preparer.prepare(Batch(1, samples), digest="").with_pixels()


def gradients(learner: Learner, batch: ReadyBatch) -> tuple[float, dict[str, torch.Tensor]]:
    metric_sums = MetricSums(SUM_NAMES)
    learner.optimizer.zero_grad(set_to_none=True)
    for micro_batch in batch.micro_batches:
        learner.backward(micro_batch, metric_sums)
    grads = {n: p.grad.clone() for n, p in learner.forward.model.named_parameters()}
    return metric_sums.read()["loss"], grads


def test_plain_mask_matches_the_flat_pattern() -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 9, 3]
    ends = np.repeat(np.cumsum(lengths), lengths)
    q, k, v = (torch.randn(1, heads, 18, 8) for heads in (4, 2, 2))
    device = torch.device("cpu")
    flat = PackedPattern(lengths, device).attend(0, q, k, v, 0.3)
    tree = TreePattern(ends, device).attend(0, q, k, v, 0.3)
    assert torch.allclose(flat, tree, atol=1e-6)
    assert isinstance(build_attention_pattern(ends, device), PackedPattern)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_matches_plain_transformers(
    learner: Learner, tiny_model: Path, store: MediaStore, temperature: float
) -> None:
    """Tokens, pixels and positions through transformers' own forward give the same logprobs."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    samples = [
        msgspec.structs.replace(sample, temperature=temperature)
        for sample in making.samples(tiny_model, store, count=3, seed=7)
    ]
    batch = ready(learner, store, samples, WHOLE)
    scored = learner.score(batch.with_pixels().micro_batches[0])
    stepped = learner.step(batch)
    ours = stepped.scores.logprobs.numpy()
    np.testing.assert_allclose(scored, ours, atol=2e-5)
    origins = {o.trace_id: [] for o in stepped.scores.origins}
    for o in stepped.scores.origins:
        origins[o.trace_id].append(ours[o.start : o.stop])
    for sample in samples:
        theirs = plain_logprobs(model, sample, learner, store)
        np.testing.assert_allclose(np.concatenate(origins[sample.trace_id]), theirs, atol=2e-5)


def plain_logprobs(
    model: torch.nn.Module, sample: Sample, learner: Learner, store: MediaStore
) -> np.ndarray:
    ids = torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None]
    inputs: dict[str, torch.Tensor] = {"input_ids": ids}
    if sample.slots:
        refs = [sample.items[slot.item] for slot in sample.slots]
        rows = [
            learner.family.rows(learner.family.patches(store.image(i.ref), i))  # type: ignore
            for i in refs
        ]
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(rows))
        inputs["image_grid_thw"] = torch.tensor([i.grid for i in refs])
        pads = torch.isin(ids, torch.tensor(learner.family.slot_token_ids))
        inputs["mm_token_type_ids"] = pads.int()
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    logits[:, list(learner.pad_ids)] = float("-inf")
    trained = torch.from_numpy(sample.trained.numpy().astype(np.int64))
    logs = torch.log_softmax(logits[trained - 1] / sample.temperature, dim=-1)
    return logs.gather(-1, ids[0][trained, None]).squeeze(-1).numpy()


def test_training_is_not_random(store: MediaStore, tmp_path: Path) -> None:
    """A checkpoint's dropout, as in Phi and many vision towers, stays off."""
    write_kind("llava", tmp_path)
    config = LlavaConfig.from_pretrained(tmp_path)
    text = config.text_config
    sizes = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "eos_token_id")}
    config.text_config = Phi3Config(
        **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, bos_token_id=0,
        pad_token_id=0, intermediate_size=64, resid_pdrop=0.5, attention_dropout=0.5,
    )  # fmt: skip
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    trainer = making.trainer_config(activation_checkpointing=True)
    learner = making.build_learner(making.model_config(tmp_path), trainer, store, 9)
    batch = ready(learner, store, making.samples(tmp_path, store, count=1), WHOLE)
    scored = learner.score(batch.with_pixels().micro_batches[0])
    trained = learner.step(batch).scores.logprobs.numpy()
    learner = making.build_learner(making.model_config(tmp_path), trainer, store, 9)
    learner.forward.model.eval()
    plain = learner.score(batch.with_pixels().micro_batches[0])
    np.testing.assert_allclose(trained, plain, atol=1e-6)
    np.testing.assert_allclose(scored, plain, atol=1e-6)


@pytest.mark.parametrize("bound", [1e-3, 1e9])
def test_a_gradient_above_the_bound_is_scaled_to_it(
    tiny_model: Path, store: MediaStore, bound: float
) -> None:
    config = making.trainer_config(max_grad_norm=bound)
    learner = making.build_learner(making.model_config(tiny_model), config, store, steps=10)
    norms: list[float] = []

    def note(*_: object) -> None:
        grads = [p.grad for p in learner.forward.model.parameters() if p.grad is not None]
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))

    learner.optimizer.register_step_pre_hook(note)
    samples = making.samples(tiny_model, store, count=2)
    before = learner.step(ready(learner, store, samples, WHOLE)).metrics["grad_norm"]
    assert before is not None and before > 1e-2
    assert norms == [pytest.approx(min(bound, before), rel=1e-3)]
