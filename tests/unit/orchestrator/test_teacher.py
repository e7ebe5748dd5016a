"""A teacher on a server scores the policy's tokens, and its scores are in the batch on disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from sightline.algo.algorithms import load_algorithm
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError, EngineError, MediaRefused, Misaligned, PolicyMismatch
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.families.relayout import lay_out_again
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import assistant, user, video
from sightline.orchestrator.run_state import Progress
from sightline.orchestrator.teacher import LEASE, ServedTeacher
from sightline.pack.truncate import truncate_sample
from sightline.rollout.client import GenerateClient
from sightline.trainer.sft import build_sample
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.sample import Sample
from tests import making
from tests.serving import Client, Reference, live
from tests.unit.trainer.test_algorithm_step import (
    advantages_by_trace,
    build,
    prepare,
    without_advantages,
)

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "teacher"
    write_tiny("qwen_vl", path, seed=7)
    return path


def serve(folder: Path, media: MediaStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=folder, media_roots=(media.root,), device="cpu", max_model_len=2048
    )
    with live(settings) as client:
        yield client


@pytest.fixture(scope="module")
def server(folder: Path, media: MediaStore) -> Iterator[Client]:
    yield from serve(folder, media)


def score(
    server: Client, folder: Path, media: MediaStore, samples: list[Sample], progress: Progress
) -> list[Sample]:
    async def main() -> list[Sample]:
        client = GenerateClient(f"http://{server.host}:{server.port}")
        try:
            pads = load_renderer(folder, media).pad_token_ids
            teacher = ServedTeacher(client, load_family(folder), pads[0], progress)
            dropped = replace(samples[0])
            teacher.start([*samples, dropped])
            return await teacher.finish(samples)
        finally:
            await client.close()

    return asyncio.run(main())


def test_served_teacher_gives_the_advantages_of_one_in_the_trainer(
    server: Client, folder: Path, tiny_model: Path, media: MediaStore
) -> None:
    samples = without_advantages(making.samples(tiny_model, media, count=4, seed=3))
    assert any(sample.slots for sample in samples)
    scored = score(server, folder, media, samples, Progress())
    found = {}
    for address, batch in (("", samples), ("http://unused", scored)):
        settings = AlgorithmConfig(
            name="distill", teacher=str(folder), teacher_server=address, measure_entropy=False
        )
        learner = build(tiny_model, media, load_algorithm(settings))
        assert (learner.teacher is None) == bool(address)
        ready = prepare(learner, media, batch)
        found[address] = advantages_by_trace(learner._score_first(ready)[0])
    assert found[""].keys() == found["http://unused"].keys()
    for name, advantages in found[""].items():
        np.testing.assert_allclose(found["http://unused"][name], advantages, atol=TOLERANCE)


def draw_large_image(model: Path, media: MediaStore) -> Sample:
    """Return a sample whose image has another number of tokens in the other family."""
    picture = media.put(making.image(random.Random(0), 160, 96))
    talk = [user("what is", picture), assistant("red green blue")]
    sample = build_sample(talk, load_renderer(model, media), "large")
    return replace(sample, logprobs=Array.of(-np.ones(len(sample.trained)), "float32"))


def test_teacher_of_another_family_scores_the_same_ids_with_its_own_images(
    tiny_model: Path, media: MediaStore, tmp_path: Path
) -> None:
    write_tiny("qwen_vl", tmp_path / "older", seed=5, type="qwen2_5_vl")
    samples = [draw_large_image(tiny_model, media)]
    samples += making.samples(tiny_model, media, count=4, seed=9)
    reference = Reference(tmp_path / "older", media)
    for server in serve(tmp_path / "older", media):
        scored = score(server, tmp_path / "older", media, samples, Progress())
    family, pad = reference.family, reference.renderer.pad_token_ids[0]
    [slot] = samples[0].slots
    assert slot.length != family.num_tokens(family.item(samples[0].items[0].ref))
    for sample, answer in zip(samples, scored, strict=True):
        placed = [Slot(s.offset, s.length, sample.items[s.item]) for s in sample.slots]
        own = sample.token_ids.numpy().tolist()
        ids, slots, index = lay_out_again(own, placed, family, pad)
        in_slots = {at for slot in placed for at in range(slot.offset, slot.end)}
        text = [at for at in range(len(own)) if at not in in_slots]
        assert [ids[index[at]] for at in text] == [own[at] for at in text]
        assert [slot.item for slot in slots] == [family.item(s.item.ref) for s in placed]
        expected = reference.logprobs(ids[:1], ids[1:], slots, sample.temperature)
        places = index[sample.trained.numpy()] - 1
        assert answer.teacher_logprobs is not None
        np.testing.assert_allclose(
            answer.teacher_logprobs.numpy(), np.array(expected)[places], atol=TOLERANCE
        )


def test_videos_are_not_laid_out_for_another_family(tiny_model: Path, tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path, seed=5, type="qwen2_5_vl")
    store, rng = MediaStore(tmp_path / "media"), random.Random(0)
    film = video([(store.put(making.image(rng, 64, 64)), 0.5 * i) for i in range(4)])
    samples = making.samples(tiny_model, store, count=8, videos=[film])
    sample = next(s for s in samples if any(item.step is not None for item in s.items))
    placed = [Slot(s.offset, s.length, sample.items[s.item]) for s in sample.slots]
    ids = sample.token_ids.numpy().tolist()
    assert lay_out_again(ids, placed, load_family(tiny_model), 0)[0] == ids
    with pytest.raises(MediaRefused, match="videos"):
        lay_out_again(ids, placed, load_family(tmp_path), 0)


def test_teacher_with_other_weights_than_at_the_start_ends_the_run(
    server: Client, folder: Path, tiny_model: Path, media: MediaStore
) -> None:
    samples = making.samples(tiny_model, media, count=1)
    with pytest.raises(PolicyMismatch, match="the run began with 7"):
        score(server, folder, media, samples, Progress(teacher="7"))


def test_no_run_replaces_a_teachers_weights(server: Client) -> None:
    async def main() -> None:
        client = GenerateClient(f"http://{server.host}:{server.port}")
        try:
            for _ in range(2):  # two students share the teacher
                await client.lease(LEASE, 30.0)
            with pytest.raises(EngineError, match="leased"):
                await client.lease("ab12", 30.0)
        finally:
            await client.lease(LEASE, 0.0)
            await client.close()

    asyncio.run(main())


def test_batch_without_the_teachers_logprobs_is_refused(
    folder: Path, tiny_model: Path, media: MediaStore
) -> None:
    settings = AlgorithmConfig(name="distill", teacher=str(folder), teacher_server="http://unused")
    learner = build(tiny_model, media, load_algorithm(settings))
    samples = without_advantages(making.samples(tiny_model, media, count=1))
    with pytest.raises(Misaligned, match="no logprobs of the teacher"):
        learner.step(prepare(learner, media, samples))


def test_truncated_sample_keeps_the_teachers_logprobs_of_its_tokens(
    server: Client, folder: Path, tiny_model: Path, media: MediaStore
) -> None:
    samples = making.samples(tiny_model, media, count=8)
    sample = max(samples, key=lambda sample: len(sample.trained))
    [scored] = score(server, folder, media, [sample], Progress())
    shorter = truncate_sample(scored, int(sample.trained.numpy()[-1]))
    assert isinstance(shorter, Sample)
    assert shorter.teacher_logprobs is not None and scored.teacher_logprobs is not None
    kept = len(shorter.trained)
    assert 0 < kept < len(sample.trained)
    np.testing.assert_array_equal(
        shorter.teacher_logprobs.numpy(), scored.teacher_logprobs.numpy()[:kept]
    )


def test_a_teachers_server_needs_its_folder() -> None:
    with pytest.raises((ConfigError, ValueError), match="teacher_server is set without teacher"):
        AlgorithmConfig(name="distill", teacher_server="http://127.0.0.1:1")
