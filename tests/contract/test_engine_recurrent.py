"""The generate protocol on a model with recurrent layers.

Results equal those of transformers and the trainer, alone and in a batch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import making
import msgspec
import numpy as np
import pytest
import torch
from serving import GREEDY, Client, Reference, Together, live, next_turn

from sightline.compute.weights import write_weights
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import ImagePart, Message, user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.generate import GenerateResponse, SamplingParams
from sightline.wire.sample import Batch, Sample, Segment

TOLERANCE = 1e-4
"""The float32 tolerance for a state that depends on every earlier token.

The order of summation depends on the other sequences in the batch. A lost or swapped state changes
the first digit.
"""
Prompt = tuple[list[int], list[Slot]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with two layers of each kind, with weights under which the state matters."""
    path = tmp_path_factory.mktemp("models") / "recurrent"
    write_tiny("qwen_vl", path, seed=0, type="qwen3_5", layers=4, initializer_std=0.1)
    return path


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def settings(model: Path, media: MediaStore) -> ServerSpec:
    return ServerSpec.of(
        path=model, media_roots=(media.root,), device="cpu", max_num_seqs=64, max_model_len=2048,
        weights_root="/",
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as live_client:
        yield live_client


@pytest.fixture
def fresh(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model: Path, media: MediaStore) -> Reference:
    return Reference(model, media)


@pytest.fixture(scope="module")
def prompts(reference: Reference, media: MediaStore) -> list[Prompt]:
    """Return prompts of many lengths, two of them alike, with zero to two images each."""
    rng = random.Random(0)
    built = []
    for i in range(8):
        refs = [media.put(making.image(rng)) for _ in range(i % 3)]
        words = " ".join(rng.choices(making.WORDS, k=1 + 7 * (i % 7)))
        rendered = reference.renderer.render([user(words, *refs)])
        built.append((rendered.token_ids, rendered.slots))
    return [*built, built[0]]


def logprobs_of(answer: GenerateResponse) -> list[float]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    return [entry.logprob for entry in logprobs.content]


def all_of(client: Client, prompts: list[Prompt], params: SamplingParams) -> list[GenerateResponse]:
    """Return the answers to concurrent requests."""
    together = Together(client)
    answers = [together.generate(*prompt, params) for prompt in prompts]
    return [answer.result() for answer in answers]


def test_greedy_decoding_matches_transformers(
    client: Client, reference: Reference, prompts: list[Prompt]
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    for prompt, answer in zip(prompts, all_of(client, prompts, params), strict=True):
        assert answer.choices[0].token_ids == reference.greedy(*prompt, 24)


@pytest.mark.parametrize(("chunk", "temperature"), [(512, 1.0), (5, 0.6), (1, 1.0)])
def test_logprobs_match_a_plain_forward_pass_for_any_chunk_size(
    settings: ServerSpec,
    reference: Reference,
    prompts: list[Prompt],
    chunk: int,
    temperature: float,
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    with live(settings.replace(prefill_chunk_tokens=chunk)) as chunked:
        answers = all_of(chunked, prompts, params)
    for (tokens, slots), answer in zip(prompts, answers, strict=True):
        expected = reference.logprobs(tokens, answer.choices[0].token_ids, slots, temperature)
        np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)


def test_one_token_prompt_starts_without_state_while_others_decode(
    client: Client, reference: Reference, prompts: list[Prompt]
) -> None:
    all_of(client, prompts, GREEDY)  # they leave their states in the rows
    before = client.totals()["sampled_tokens"]
    params = SamplingParams(max_tokens=120, seed=1)
    long = Together(client).generate(*prompts[2], params)
    client.wait_for("totals", "sampled_tokens", before + 5)
    short = client.generate([65], [], SamplingParams(max_tokens=8, seed=1))
    assert not long.done()
    for (tokens, slots), answer in ((([65], []), short), (prompts[2], long.result())):
        expected = reference.logprobs(tokens, answer.choices[0].token_ids, slots)
        np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)


def test_turn_computes_only_new_tokens_and_matches_the_trainer(
    client: Client, fresh: Client, model: Path, media: MediaStore, reference: Reference
) -> None:
    """Run three turns with images, in several conversations at once, on two engines.

    One engine continues from its cached states. The other prefills every turn again.
    """
    rng, renderer = random.Random(1), reference.renderer
    talks: list[Prompt] = []
    for i in range(5):
        rendered = renderer.render([user("see " * i, media.put(making.image(rng)))])
        talks.append((rendered.token_ids, rendered.slots))
    sampled: list[list[tuple[int, list[float]]]] = [[] for _ in talks]
    for turn in range(3):
        for seed in itertools.count(100 * turn):
            params = SamplingParams(max_tokens=10, seed=seed)
            anew = msgspec.structs.replace(params, skip_reading_prefix_cache=True)
            others = all_of(fresh, talks, anew)
            spoken = {token for other in others for token in other.choices[0].token_ids}
            if not spoken.intersection(renderer.stop_token_ids):
                break
        answers = all_of(client, talks, params)
        for i, (answer, other) in enumerate(zip(answers, others, strict=True)):
            tokens, slots = talks[i]
            assert answer.sightline is not None and other.sightline is not None
            # All but the last sampled token, which had no successor.
            known = sampled[i][-1][0] + 9 if turn else 0
            assert (answer.sightline.cached_tokens, other.sightline.cached_tokens) == (known, 0)
            assert answer.choices[0].token_ids == other.choices[0].token_ids
            np.testing.assert_allclose(logprobs_of(answer), logprobs_of(other), atol=TOLERANCE)
            assert len(answer.sightline.pixel_digests) == len(slots)
            sampled[i].append((len(tokens), logprobs_of(answer)))
            # Use a tool message: a user's question would drop the reasoning of earlier turns.
            message = Message("tool", (ImagePart(media.put(making.image(rng))),))
            talks[i] = next_turn(renderer, tokens, slots, answer.choices[0].token_ids, message)
    samples = [sample(*talk, sampled[i], name=f"t{i}") for i, talk in enumerate(talks)]
    learner = making.build_learner(
        making.model_config(model), making.trainer_config(), media, steps=10
    )
    materializer = Materializer(learner.family, media, 1 << 24)
    preparer = BatchPreparer(
        MicroBatchPixels(materializer),
        PackSize(4096, 4096),
        BadMediaPolicy(allows_unverified_pixels=True),
    )
    stepped = learner.step(preparer.prepare(Batch(1, samples), digest=""))
    gap = np.abs(np.log(stepped.scores.ratios.numpy())).max()
    kl = stepped.metrics["mismatch_kl"]
    print(f"{stepped.metrics['fresh_tokens']:.0f} tokens: max abs {gap:.1e}, KL {kl:.1e}")
    assert stepped.metrics["fresh_tokens"] == 5 * 3 * 10
    assert gap < 1e-4
    assert kl is not None and kl < 1e-8


def sample(
    tokens: list[int], slots: list[Slot], answers: list[tuple[int, list[float]]], name: str
) -> Sample:
    """Return a whole conversation whose answers train."""
    logprobs = [logprob for _, part in answers for logprob in part]
    trained = [np.arange(start, start + len(part)) for start, part in answers]
    num = len(logprobs)
    return Sample(
        trace_id=name,
        group_id="",
        env="",
        reward=0.0,
        token_ids=Array.of(tokens, "int32"),
        trained=Array.of(np.concatenate(trained), "int32"),
        logprobs=Array.of(logprobs, "float32"),
        advantages=Array.of(np.ones(num), "float32"),
        versions=Array.of(np.zeros(num), "int32"),
        segments=[Segment(s, s + len(part), node=i) for i, (s, part) in enumerate(answers)],
        items=[slot.item for slot in slots],
        slots=[Slot(s.offset, s.length, i) for i, s in enumerate(slots)],
    )


def test_update_during_answers_prefills_them_again(
    fresh: Client, model: Path, reference: Reference, prompts: list[Prompt], tmp_path: Path
) -> None:
    changed = Reference(model, reference.store)
    with torch.no_grad():
        for parameter in changed.model.parameters():
            parameter.mul_(1.1)
    manifest, _ = write_weights(tmp_path, dict(changed.model.named_parameters()), 7, 7)
    together = Together(fresh)
    params = SamplingParams(max_tokens=120, seed=1)
    answers = [together.generate(*prompt, params) for prompt in prompts[:3]]
    fresh.wait_for("totals", "sampled_tokens", 30)
    fresh.adopt(manifest)
    for (tokens, slots), answer in zip(prompts[:3], answers, strict=True):
        choice = answer.result().choices[0]
        assert choice.weight_versions is not None
        first, second = choice.weight_versions
        assert (first.version, second.version, second.end) == ("0", "7", 120)
        logprobs = logprobs_of(answer.result())
        for span, witness in ((first, reference), (second, changed)):
            expected = witness.logprobs(tokens, choice.token_ids, slots)[span.start : span.end]
            # The other version differs by 0.1 and more, and recurrent states amplify rounding.
            np.testing.assert_allclose(logprobs[span.start : span.end], expected, atol=5e-4)
    assert fresh.totals()["prefilled_again"] == 3
