"""A tiny Kimi K2.5 in transformers, in the embedded engine and in the trainer: one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import making
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from serving import Client, Reference, Together, live, next_turn

from sightline import FamilyError, MediaStore
from sightline.cli.model import count_parameters
from sightline.compute.attention import PackedPattern
from sightline.compute.model import load_model
from sightline.families import load_family
from sightline.families.kimi_k25 import tiny
from sightline.inference.server_spec import ServerSpec
from sightline.message import user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.build import build_learner
from sightline.trainer.export import export_checkpoint
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.step_result import MetricSums, StepTimer
from sightline.wire.generate import SamplingParams
from sightline.wire.sample import Batch, Sample


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    tiny.write(path)
    return path


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def reference(kimi: Path, media: MediaStore) -> Reference:
    return Reference(kimi, media)


@pytest.fixture(scope="module")
def client(kimi: Path, media: MediaStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=kimi, media_roots=(media.root,), device="cpu", max_num_seqs=16, max_model_len=1024
    )
    with live(settings) as made:
        yield replace(made, modality=load_family(kimi).modality)


def test_equal_seeds_write_equal_checkpoints(kimi: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path / "same")
    tiny.write(tmp_path / "other", seed=1)
    for file in sorted(kimi.iterdir()):
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (kimi / weights).read_bytes()
    assert count_parameters(kimi) < 1_000_000


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for options in ({"experts": 1}, {"experts_per_token": 9}, {"type": "x"}, {"depth": 3}):
        with pytest.raises(FamilyError):
            tiny.write(tmp_path, **options)


def test_the_forward_pass_is_that_of_transformers(
    kimi: Path, media: MediaStore, reference: Reference
) -> None:
    family = load_family(kimi)
    forward = load_model(kimi, family, "cpu", "float32")
    refs = [media.put(Image.effect_noise(size, 90).convert("RGB")) for size in ((28, 28), (70, 30))]
    rendered = reference.renderer.render([user("what", refs[0], "is", refs[1], "this?")])
    items = [slot.item for slot in rendered.slots]
    patches = [family.patches(media.image(item.ref), item) for item in items]
    with torch.no_grad():
        features = forward.encode(
            torch.from_numpy(np.concatenate(patches)), [item.grid for item in items]
        )
        places = [np.arange(slot.offset, slot.end) for slot in rendered.slots]
        positions, _ = family.positions(len(rendered.token_ids), [])
        hidden = forward.hidden(
            torch.tensor([rendered.token_ids]),
            torch.from_numpy(positions.astype(np.int64))[:, None],
            features,
            torch.from_numpy(np.concatenate(places)),
            PackedPattern([len(rendered.token_ids)], torch.device("cpu")),
        )
        logits = forward.logits(hidden[0])
    expected = reference.logits(rendered.token_ids, rendered.slots)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_the_vision_parameters_are_all_that_features_depend_on(kimi: Path) -> None:
    forward = load_model(kimi, load_family(kimi), "cpu", "float32")
    named = dict(forward.model.named_parameters())
    vision = dict(forward.vision_parameters())
    assert all(named[name] is parameter for name, parameter in vision.items())
    forward.encode(torch.zeros(4, 588, dtype=torch.uint8), [(1, 2, 2)]).sum().backward()
    assert {name for name, p in named.items() if p.grad is not None} == set(vision)


def test_an_exported_checkpoint_has_all_that_the_source_has(kimi: Path, tmp_path: Path) -> None:
    model = load_model(kimi, load_family(kimi), "cpu", "float32").model
    # The bias that balances experts is no parameter; a checkpoint without it routes otherwise.
    name = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    export_checkpoint(kimi, tmp_path / "out", model)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(kimi / "model.safetensors")
    assert exported.keys() == source.keys()
    assert [n for n in source if not torch.equal(source[n], exported[n])] == [name]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engine_gives_the_logprobs_of_a_plain_forward_pass(
    client: Client, reference: Reference, media: MediaStore, temperature: float
) -> None:
    prompts = []
    for i, size in enumerate(((28, 28), (64, 96), (130, 20))):
        ref = media.put(Image.new("RGB", size, (80 * i, 200, 30)))
        rendered = reference.renderer.render([user("What is it?" * (i + 1), ref)])
        prompts.append((rendered.token_ids, rendered.slots))
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    together = Together(client)
    answers = [together.generate(*prompt, params) for prompt in prompts]
    for (tokens, slots), answer in zip(prompts, answers, strict=True):
        check_logprobs(reference, tokens, slots, answer.result(), temperature)


def test_the_engine_keeps_keys_and_values_over_turns(
    client: Client, reference: Reference, media: MediaStore
) -> None:
    rendered = reference.renderer.render([user("Look.", media.put(Image.new("RGB", (40, 90))))])
    tokens, slots = rendered.token_ids, rendered.slots
    known, stops = 0, reference.renderer.stop_token_ids
    for turn in range(3):
        params = SamplingParams(max_tokens=6, seed=turn, stop_token_ids=stops)
        answer = client.generate(tokens, slots, params)
        assert answer.sightline is not None and answer.sightline.cached_tokens == known
        said = check_logprobs(reference, tokens, slots, answer)
        known = len(tokens) + len(said) - 1
        shown = media.put(Image.new("RGB", (60, 30 * (turn + 1)), (9, 90, 60 * turn)))
        tokens, slots = next_turn(reference.renderer, tokens, slots, said, user("And?", shown))


def check_logprobs(
    reference: Reference, tokens: list[int], slots: list, answer: object, temperature: float = 1.0
) -> list[int]:
    choice = answer.choices[0]  # type: ignore[attr-defined]
    said: list[int] = choice.token_ids
    expected = reference.logprobs(tokens, said, slots, temperature)
    got = [entry.logprob for entry in choice.logprobs.content]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    return said


# -- trainer


@pytest.fixture
def learner(kimi: Path, store: MediaStore) -> Learner:
    config = making.trainer_config(kl_coef=0.1)
    return build_learner(making.model_config(kimi), config, store, steps=10)


def ready(
    learner: Learner, store: MediaStore, samples: list[Sample], limit: PackSize
) -> ReadyBatch:
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(learner.family, materializer, limit)
    return preparer.prepare(Batch(1, samples), digest="").with_pixels()


def gradients(learner: Learner, batch: ReadyBatch) -> tuple[float, dict[str, torch.Tensor]]:
    metric_sums = MetricSums(SUM_NAMES)
    learner.optimizer.zero_grad(set_to_none=True)
    for micro_batch in batch.micro_batches:
        learner.backward(micro_batch, batch.step, metric_sums, StepTimer(learner.device))
    named = learner.forward.model.named_parameters()
    return metric_sums.read()["loss"], {
        name: p.grad.clone() for name, p in named if p.grad is not None
    }


@pytest.mark.parametrize("seed", range(2))
def test_packed_gives_the_loss_and_gradients_of_unpacked(
    learner: Learner, kimi: Path, store: MediaStore, seed: int
) -> None:
    samples = making.samples(kimi, store, count=5, seed=seed)
    packed = ready(learner, store, samples, PackSize(1 << 20, 1 << 20))
    unpacked = ready(learner, store, samples, PackSize(1, 1))
    assert len(packed.micro_batches) == 1 and len(unpacked.micro_batches) == 5
    loss, together = gradients(learner, packed)
    loss_alone, alone = gradients(learner, unpacked)
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    assert together.keys() == alone.keys()
    floor = 1e-3 * max(float(g.norm()) for g in alone.values())
    for name, gradient in alone.items():
        size = max(float(gradient.norm()), floor)
        assert float((gradient - together[name]).norm()) / size < 1e-5, name
