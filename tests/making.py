"""Small real objects that several suites need: images, samples, learners."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from sightline.algo.algorithms import GRPO
from sightline.compute.attention import PackedPattern
from sightline.compute.tensor_file import HostCopy
from sightline.compute.weights import write_weights
from sightline.config import AlgorithmConfig, ModelConfig, TrainerConfig
from sightline.families import Family, load_family, load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import Message, VideoPart, assistant, user
from sightline.pixels import Materializer
from sightline.render import Rendered
from sightline.trainer import build
from sightline.trainer.learner import Learner
from sightline.trainer.lora import select_published
from sightline.trainer.sft import build_sample
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.sample import Sample
from sightline.wire.weights import Adapter, Manifest

MODEL = "qwen_vl"
WORDS = ["red", "green", "blue", "A", "B", "C", "D", "user", "codeword", "what", "is", "this"]


def image(rng: random.Random, width: int = 0, height: int = 0) -> Image.Image:
    """Return noise that is different in every call."""
    width = width or rng.choice([32, 40, 64, 96])
    height = height or rng.choice([32, 48, 64])
    noise = np.frombuffer(rng.randbytes(width * height * 3), dtype=np.uint8)
    return Image.fromarray(noise.reshape(height, width, 3))


def conversation(
    rng: random.Random,
    store: MediaStore,
    pool: list[MediaRef],
    turns: int = 2,
    most_images: int = 2,
    videos: Sequence[VideoPart] = (),
) -> list[Message]:
    """Turns with texts and images. Some images come from the pool and are shown again, and so does
    one of the `videos` in every other turn."""
    messages: list[Message] = []
    for _ in range(turns):
        parts: list[Any] = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6)))]
        if videos and rng.random() < 0.5:
            parts.append(rng.choice(videos))
        for _ in range(rng.randint(0, most_images)):
            if pool and rng.random() < 0.4:
                parts.append(rng.choice(pool))
            else:
                pool.append(store.put(image(rng)))
                parts.append(pool[-1])
        rng.shuffle(parts)
        messages += [user(*parts), assistant(" ".join(rng.choices(WORDS, k=rng.randint(1, 5))))]
    return messages


def samples(
    model: Path,
    store: MediaStore,
    count: int,
    seed: int = 0,
    version: int = 0,
    videos: Sequence[VideoPart] = (),
) -> list[Sample]:
    """Trainable samples with images, where the checkpoint shows any, random logprobs and
    advantages, and true pixel digests."""
    rng = random.Random(seed)
    renderer, family = load_renderer(model, store), load_family(model)
    materializer = Materializer(family, store, max_bytes=1 << 24)
    most = 2 if family.shows_media else 0
    pool: list[MediaRef] = []
    built = []
    for i in range(count):
        talk = conversation(rng, store, pool, rng.randint(1, 3), most, videos)
        plain = build_sample(talk, renderer, f"t{seed}.{i}")
        built.append(_trainable(plain, f"g{i // 4}", seed * 1000 + i, version, materializer))
    materializer.close()
    return built


def group(
    model: Path,
    store: MediaStore,
    count: int,
    seed: int = 0,
    name: str = "group",
    videos: Sequence[VideoPart] = (),
) -> list[Sample]:
    """Return samples that share a beginning and diverge at some turn.

    Each trains all its answers.
    """
    rng = random.Random(f"group {seed}")
    renderer, family = load_renderer(model, store), load_family(model)
    materializer = Materializer(family, store, max_bytes=1 << 24)
    most = 2 if family.shows_media else 0
    pool: list[MediaRef] = []
    talks = [conversation(rng, store, pool, 3, most, videos)]
    while len(talks) < count:
        before = rng.choice(talks)
        history = before[: 2 * rng.randint(1, len(before) // 2 - 1) + 1]
        answer = assistant(" ".join(rng.choices(WORDS[:2], k=rng.randint(1, 3))))
        talks.append([*history, answer, *conversation(rng, store, pool, 1, most, videos)])
    samples = [
        _trainable(
            build_sample(talk, renderer, f"{name}.{i}"), name, seed * 1000 + i, 0, materializer
        )
        for i, talk in enumerate(talks)
    ]
    materializer.close()
    return samples


def _trainable(
    plain: Sample, group_id: str, seed: int, version: int, materializer: Materializer
) -> Sample:
    draws, num = np.random.default_rng(seed), len(plain.trained)
    return Sample(
        trace_id=plain.trace_id,
        group_id=group_id,
        env="test",
        reward=float(draws.random()),
        token_ids=plain.token_ids,
        trained=plain.trained,
        logprobs=Array.of(-draws.random(num) * 3 - 4, "float32"),
        advantages=Array.of(draws.normal(size=num), "float32"),
        versions=Array.of(np.full(num, version), "int32"),
        segments=plain.segments,
        items=plain.items,
        slots=[
            Slot(s.offset, s.length, s.item, materializer.get(plain.items[s.item]).digest)
            for s in plain.slots
        ],
    )


def with_routes(sample: Sample, layers: int, experts: int = 4) -> Sample:
    """Return the sample with routes to two experts per layer, which follow from its tokens."""
    ids = sample.token_ids.numpy().astype(np.int64)
    draw = (np.cumsum(ids * (np.arange(len(ids)) + 1))[:, None] // (np.arange(layers) + 1)) % 97
    routes = np.stack([draw % experts, (draw + 1) % experts], axis=-1)
    routes[-1] = 255
    return msgspec.structs.replace(sample, routes=Array.of(routes, "uint8"))


def family(model: Path) -> Family:
    return load_family(model)


def model_config(path: Path, **changes: object) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path), **changes})


def trainer_config(**changes: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"device": "cpu", "lr": 1e-3, **changes})


def algorithm(**changes: object) -> GRPO:
    """Return GRPO with bounds so wide that nothing is clipped, unless `loss_args` is given."""
    wide = {"clip_low": 100.0, "clip_high": 100.0}
    return GRPO(AlgorithmConfig.model_validate({"loss_args": wide, **changes}))


def build_learner(*args: Any, **options: Any) -> Learner:
    """The trainer's learner, by default with an algorithm that clips nothing."""
    return build.build_learner(*args, **{"algorithm": algorithm(), **options})


@torch.no_grad()
def trainer_logprobs(
    learner: Learner, store: MediaStore, rendered: Rendered, completion: Sequence[int]
) -> np.ndarray:
    """Return an answer's logprobs by the trainer's own forward pass, without banned ids."""
    family, forward = learner.family, learner.forward
    ids = [*rendered.token_ids, *completion]
    placed, _ = family.positions(len(ids), rendered.slots)
    positions = torch.from_numpy(placed.astype(np.int64))[:, None]
    features = places = None
    if items := [slot.item for slot in rendered.slots]:
        patches = np.concatenate([family.patches(store.image(i.ref), i) for i in items])
        features = forward.encode(torch.from_numpy(patches), [i.grid for i in items])
        offsets = [s.offset + family.feature_offsets(s.item) for s in rendered.slots]
        places = torch.from_numpy(np.concatenate(offsets))
    pattern = PackedPattern([len(ids)], torch.device("cpu"))
    hidden = forward.hidden(torch.tensor([ids]), positions, features, places, pattern)[0]
    logits = forward.logits(hidden[len(rendered.token_ids) - 1 : -1])
    logits[:, list(learner.pad_ids)] = float("-inf")
    logs = torch.log_softmax(logits, -1).gather(1, torch.tensor(list(completion))[:, None])[:, 0]
    logprobs: np.ndarray = logs.float().numpy()
    return logprobs


def publish(
    model: Any, root: Path, step: int, dtype: Any, stand: Adapter | None = None
) -> tuple[Path, Manifest]:
    """Publish a version like the trainer: copy it, then write it."""
    copy = HostCopy()
    copy.take(*select_published(model, stand, dtype))
    return write_weights(root, copy.tensors(), step, step, adapter=stand)
