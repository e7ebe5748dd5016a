"""A supervised warm-up: demonstrations of an environment, through the same packing and forward.

Only what the assistant says is trained.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sightline.compute.logprobs import chosen_logprobs
from sightline.compute.model import DTYPES
from sightline.config import SftFile
from sightline.envs import Environment
from sightline.envs.mix import build_environment
from sightline.envs.protocol import Tools
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import Message
from sightline.monitor import EventLog, RunDir
from sightline.pack import Cost
from sightline.render import Renderer
from sightline.trainer.build import build_learner, build_materializer
from sightline.trainer.checks import check_micro_batch
from sightline.trainer.export import export_checkpoint
from sightline.trainer.feed import Preparer, ReadyBatch, ReadyMicroBatch
from sightline.trainer.learner import Learner, hidden_of
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample, SampleSlot, Segment


@dataclass
class Parts:
    env: Environment
    renderer: Renderer
    store: MediaStore
    learner: Learner
    preparer: Preparer
    events: EventLog
    config: SftFile


def build(config: SftFile, run_dir: RunDir) -> Parts:
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_learner(config.model, config.trainer, store, config.run.steps)
    return Parts(
        env=build_environment(config.env),
        renderer=load_renderer(
            config.model.path, store, learner.family, number_pictures=config.model.number_pictures
        ),
        store=store,
        learner=learner,
        preparer=Preparer(
            learner.family,
            build_materializer(learner, store),
            Cost(config.trainer.micro_batch_tokens, config.trainer.micro_batch_patches),
            max_bad_fraction=0.0,
        ),
        events=EventLog(run_dir.metrics, "trainer"),
        config=config,
    )


def run(parts: Parts) -> None:
    """Trains for the steps of the file and writes the checkpoint that it names."""
    config = parts.config
    for step in range(1, config.run.steps + 1):
        began = time.monotonic()
        ready = parts.preparer.prepare(_batch(parts, step), digest="")
        loss = _step(parts.learner, ready)
        parts.events.write(
            "sft", step, loss=loss, seconds=time.monotonic() - began, steps_total=config.run.steps
        )
    export_checkpoint(
        Path(config.model.path),
        Path(config.sft.output),
        parts.learner.forward.model,
        DTYPES[config.model.dtype],
    )


def _batch(parts: Parts, step: int) -> Batch:
    size = parts.config.sft.batch_size
    samples = []
    for i in range((step - 1) * size, step * size):
        # Not the string that an environment seeds a task with: the same draws would leak it.
        rng = random.Random(f"{parts.config.run.seed}:demonstration:{i}")
        task = parts.env.task(i, "sft")
        samples.append(
            sample_of(
                parts.env.demonstration(task, parts.store.put, rng),
                parts.renderer,
                f"sft.{i}",
                parts.env.tools,
            )
        )
    return Batch(step, samples)


def sample_of(
    messages: list[Message], renderer: Renderer, name: str, tools: Tools | None = None
) -> Sample:
    """A conversation made trainable: the assistant's own tokens, with advantage 1."""
    rendered = renderer.render(messages, tools, generation_prompt=False)
    trained = np.concatenate([np.arange(s.start, s.stop) for s in rendered.trained])
    items = list({slot.item.key: slot.item for slot in rendered.slots}.values())
    places = {item.key: i for i, item in enumerate(items)}
    return Sample(
        trace_id=name,
        group_id="",
        env="",
        reward=0.0,
        token_ids=Array.of(rendered.token_ids, "int32"),
        trained=Array.of(trained, "int32"),
        logprobs=Array.of(np.zeros(len(trained)), "float32"),
        advantages=Array.of(np.ones(len(trained)), "float32"),
        versions=Array.of(np.zeros(len(trained)), "int32"),
        segments=[Segment(i, s.start, s.stop) for i, s in enumerate(rendered.trained)],
        items=items,
        slots=[
            SampleSlot(slot.offset, slot.length, places[slot.item.key], None)
            for slot in rendered.slots
        ],
    )


def _step(learner: Learner, ready: ReadyBatch) -> float:
    learner.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for micro_batch in ready.micro_batches:
        batch = micro_batch.batch
        check_micro_batch(batch, learner.family, learner.pad_ids, learner.vocab_size)
        loss = learner.within(_loss, learner, micro_batch)
        loss.backward()
        total += float(loss.detach())
    learner.update(ready.step)
    return total


def _loss(learner: Learner, ready: ReadyMicroBatch) -> torch.Tensor:
    batch = ready.batch
    hidden = hidden_of(learner.forward, ready, learner.family, learner.device)
    tokens = torch.from_numpy(batch.token_ids.numpy()[batch.trained.numpy()].astype(np.int64))
    weight = torch.from_numpy(batch.loss_weight.numpy().copy()).to(learner.device)
    logprobs = chosen_logprobs(
        learner.forward, hidden, tokens.to(learner.device), learner.banned, 1.0
    )
    return -(logprobs * weight).sum()
