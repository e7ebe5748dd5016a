"""vLLM receives the family's pixels, and every engine computes the trainer's logprobs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import vllm_servers
from PIL import Image
from serving import GREEDY, Client, Reference, Together, embedded, live, next_turn, read_seen

from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.generate import GenerateResponse, SamplingParams
from sightline.wire.sample import Batch, Sample, Segment

BOUND = 1e-4


def noise(seed: int, width: int, height: int) -> Image.Image:
    return making.image(random.Random(seed), width, height)


def test_vision_tower_receives_the_familys_patches(
    client: Client, settings: ServerSpec, reference: Reference, media: MediaStore
) -> None:
    folder = vllm_servers.start(settings).folder
    refs = [media.put(noise(i, *size)) for i, size in enumerate([(64, 96), (160, 32)], 900)]
    rendered = reference.renderer.render([user("Look:", *refs)])
    (folder / "wanted").touch()
    try:
        answer = client.generate(rendered.token_ids, rendered.slots)
    finally:
        (folder / "wanted").unlink()
    family = reference.family
    tower_input = read_seen(folder, family)
    for file in folder.glob("seen-*.npy"):
        file.unlink()
    patches = [family.patches(media.image(s.item.ref), s.item) for s in rendered.slots]
    ours = np.concatenate(patches)
    if family.name == "anyvlm":  # the bytes of the processor's own floats
        tower_input = tower_input.reshape(len(tower_input), -1).view(np.uint8)
    assert tower_input.dtype == np.uint8 and len(tower_input) == len(ours)
    frames = getattr(family, "temporal", 1)
    for frame in range(frames):
        rows = tower_input.reshape(len(tower_input), 3, frames, -1)[:, :, frame].reshape(
            len(tower_input), -1
        )
        np.testing.assert_array_equal(rows, ours)
    digests = Materializer(family, media, 0)
    assert answer.sightline is not None
    assert answer.sightline.pixel_digests == [digests.get(s.item).digest for s in rendered.slots]


class Talk:
    """A prompt, and a server's answer to it."""

    def __init__(self, tokens: list[int], slots: list[Slot], answer: GenerateResponse) -> None:
        self.tokens, self.slots = tokens, slots
        choice = answer.choices[0]
        assert choice.logprobs is not None and answer.sightline is not None
        self.said = choice.token_ids
        self.logprobs = np.array([entry.logprob for entry in choice.logprobs.content])
        self.digests = answer.sightline.pixel_digests

    def sample(self, name: str, digests: list[str] | None = None) -> Sample:
        num, start = len(self.said), len(self.tokens)
        items = list(dict.fromkeys(slot.item for slot in self.slots))
        return Sample(
            trace_id=name, group_id="g", env="test", reward=0.0,
            token_ids=Array.of([*self.tokens, *self.said], "int32"),
            trained=Array.of(np.arange(start, start + num), "int32"),
            logprobs=Array.of(self.logprobs, "float32"),
            advantages=Array.of(np.zeros(num), "float32"),
            versions=Array.of(np.zeros(num), "int32"),
            segments=[Segment(start, start + num, node=0)],
            items=items,
            slots=[
                Slot(slot.offset, slot.length, items.index(slot.item), digest)
                for slot, digest in zip(self.slots, digests or self.digests, strict=True)
            ],
        )  # fmt: skip


def talks(client: Client, reference: Reference, media: MediaStore) -> list[Talk]:
    """Two turns each, with images of several sizes."""
    together = Together(client)
    prompts = []
    for i in range(4):
        refs = [media.put(noise(10 * i + j, 32 * (1 + j), 64)) for j in range(1 + i % 2)]
        rendered = reference.renderer.render([user("What is it?", *refs)])
        stops = reference.renderer.stop_token_ids
        params = SamplingParams(max_tokens=16, seed=i, stop_token_ids=stops)
        first = client.generate(rendered.token_ids, rendered.slots, params)
        token_ids = first.choices[0].token_ids
        messages = user(media.put(noise(500 + i, 96, 32)), "And this?")
        tokens, slots = next_turn(
            reference.renderer, rendered.token_ids, rendered.slots, token_ids, messages
        )
        prompts.append((tokens, slots, together.generate(tokens, slots, params)))
    return [Talk(tokens, slots, answer.result()) for tokens, slots, answer in prompts]


def preparer(learner: Any, media: MediaStore) -> BatchPreparer:
    materializer = Materializer(learner.family, media, max_bytes=1 << 24)
    return BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))


def trained_logprobs(
    model: Path, media: MediaStore, samples: list[Sample]
) -> dict[str, np.ndarray]:
    """Return the trainer's logprobs for the samples, before its step."""
    config = making.trainer_config()
    learner = making.build_learner(making.model_config(model), config, media, steps=10)
    scores = learner.step(preparer(learner, media).prepare(Batch(1, samples), "")).scores
    values = scores.logprobs.numpy()
    return {origin.trace_id: values[origin.start : origin.stop] for origin in scores.origins}


def kl(sampler: np.ndarray, other: np.ndarray) -> float:
    """The sampler's divergence from another, estimated on its own tokens."""
    gap = other - sampler
    return float(np.mean(np.expm1(gap) - gap))


def test_vllm_the_embedded_engine_and_the_trainer_agree_on_every_token(
    client: Client,
    settings: ServerSpec,
    reference: Reference,
    media: MediaStore,
    tiny_model: Path,
) -> None:
    answers = talks(client, reference, media)
    samples = [talk.sample(f"t{i}") for i, talk in enumerate(answers)]
    trainer = trained_logprobs(tiny_model, media, samples)
    with embedded(settings) as torch_engine:
        for i, talk in enumerate(answers):
            tokens = [*talk.tokens, *talk.said]
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            answer = torch_engine.generate(tokens, talk.slots, params)
            assert answer.sightline is not None and answer.prompt_logprobs is not None
            assert answer.sightline.pixel_digests == talk.digests
            entries = answer.prompt_logprobs[len(talk.tokens) :]
            scored = np.array([e[t].logprob for e, t in zip(entries, talk.said, strict=True)])
            for name, other in (("embedded engine", scored), ("trainer", trainer[f"t{i}"])):
                worst = float(np.abs(other - talk.logprobs).max())
                print(f"vLLM and {name}: {worst:.1e} at most, KL {kl(talk.logprobs, other):.1e}")
                assert worst < BOUND


def test_swapped_image_exceeds_the_mismatch_bound(
    client: Client, reference: Reference, media: MediaStore, tiny_model: Path
) -> None:
    talk = talks(client, reference, media)[0]
    other = media.put(noise(4321, *_size(talk.slots[0])))
    item = reference.family.item(other)
    slots = [msgspec.structs.replace(talk.slots[0], item=item), *talk.slots[1:]]
    swapped = Talk(talk.tokens, slots, client.generate(talk.tokens, slots, GREEDY))
    sample = msgspec.structs.replace(
        talk.sample("t"), items=swapped.sample("t").items, slots=swapped.sample("t").slots
    )
    logprobs = trained_logprobs(tiny_model, media, [sample])["t"]
    assert np.abs(logprobs - talk.logprobs).max() > 10 * BOUND


def _size(slot: Slot) -> tuple[int, int]:
    return slot.item.ref.width, slot.item.ref.height


def test_alternating_and_uncached_servers_match_one_server(
    settings: ServerSpec,
    odd_settings: ServerSpec,
    reference: Reference,
    media: MediaStore,
) -> None:
    """Compare vLLM with its caches, vLLM without caches, and the embedded engine.

    No turn relies on the previous one.
    """
    with live(settings) as live_client, live(odd_settings) as bare, embedded(settings) as other:
        ways = {
            "one": [live_client],
            "in turn": [live_client, other],
            "three": [bare, other, live_client],
        }
        rollouts = {
            name: [greedy_rollout(servers, reference, media, i) for i in range(3)]
            for name, servers in ways.items()
        }
        failed = [server.totals()["failed"] for server in (live_client, bare, other)]
    assert rollouts["in turn"] == rollouts["one"] and rollouts["three"] == rollouts["one"]
    assert failed == [0, 0, 0]


def greedy_rollout(
    servers: list[Client], reference: Reference, media: MediaStore, seed: int
) -> list[int]:
    refs = [media.put(noise(7000 + 10 * seed + i, 64, 32 * (1 + i))) for i in range(4)]
    rendered = reference.renderer.render([user("What is it?", refs[0])])
    tokens, slots, turns = rendered.token_ids, rendered.slots, []
    for turn, ref in enumerate([*refs[1:], None]):
        new = servers[turn % len(servers)].generate(tokens, slots).choices[0].token_ids
        turns += new
        if ref is not None:
            tokens, slots = next_turn(reference.renderer, tokens, slots, new, user(ref, "Next?"))
    return turns
