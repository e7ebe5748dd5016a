"""Supervised training: conversations to imitate, through the same packing, ranks and forward.

    source --conversations--> feed (own thread): render, materialize, pack --ready k--> loop

Only what the assistant says is trained. A batch is a function of its step, so that what is
needed to go on after a kill is a checkpoint and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sightline.compute.model import DTYPES
from sightline.config import SftFile
from sightline.envs.mix import build_environment
from sightline.errors import MediaError, MessageError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import Message
from sightline.monitor import EventLog, RunDir
from sightline.render import Renderer
from sightline.render.protocol import Tools
from sightline.trainer.bad_media import Dropped
from sightline.trainer.build import (
    build_materializer,
    build_preparer,
    build_saver,
    build_spread,
    learner_of,
    watch_of,
)
from sightline.trainer.conversations import (
    HELD_OUT,
    TRAIN,
    Demonstrations,
    Source,
    open_conversations,
)
from sightline.trainer.export import export_checkpoint, help_export
from sightline.trainer.feed import Ahead, Preparer, ReadyBatch
from sightline.trainer.learner import Learner, Stepped
from sightline.trainer.pulse import LONG_S, Pulse
from sightline.trainer.ranks import ALONE, Follow, Lead, Ranks
from sightline.trainer.saver import Saver, alone, from_all, to_lead
from sightline.trainer.spread import ShareFeed
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample, SampleSlot, Segment


@dataclass
class Batches:
    """Conversations as batches; the same step has the same one, in every process."""

    source: Source
    renderer: Renderer
    preparer: Preparer
    size: int
    pulse: Pulse
    """Watches the thread that makes them: the loop's own rests while it waits for one."""

    def of_step(self, step: int) -> ReadyBatch:
        return self._prepare(step, range((step - 1) * self.size, step * self.size), TRAIN)

    def held_out(self, step: int) -> Iterator[ReadyBatch]:
        """All that is held out, to be evaluated after `step`."""
        num = self.source.num_held_out
        for first in range(0, num, self.size):
            stop = min(first + self.size, num)
            ready = self._prepare(step, range(first, stop), HELD_OUT)
            yield replace(ready, held_out=True, is_last=stop == num)

    def _prepare(self, step: int, indices: Iterable[int], split: str) -> ReadyBatch:
        self.pulse.mark(f"preparing step {step}")
        samples, lost = [], []
        for index in indices:
            try:
                found = self.source.conversation(index, split)
            except MediaError as error:
                if self.preparer.on_bad == "stop":
                    raise
                name = self.source.name(index, split)
                lost.append(Dropped(name, "", type(error).__name__, error.problem))
                continue
            samples.append(sample_of(found.messages, self.renderer, found.name, found.tools))
        ready = self.preparer.prepare(Batch(step, samples), "", lost)
        self.pulse.rest()
        return ready


def sample_of(
    messages: list[Message], renderer: Renderer, name: str, tools: Tools | None = None
) -> Sample:
    """A conversation made trainable: the assistant's own tokens, with advantage 1."""
    rendered = renderer.render(messages, tools, generation_prompt=False)
    if not rendered.trained:
        raise MessageError(f"{name}: nothing that the assistant says", "leave it out")
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


@dataclass
class Keeper:
    """What outlasts the process: checkpoints, metrics, and the model at the end."""

    config: SftFile
    learner: Learner
    saver: Saver
    events: EventLog | None
    """None on ranks other than 0, which hand over their shards and write nothing."""
    nll: float = 0.0
    tokens: float = 0.0

    def report(self, ready: ReadyBatch, stepped: Stepped, seconds: float) -> None:
        if self.events is None:
            return
        shown = (
            "loss", "lr", "grad_norm", "tokens", "trained_tokens", "samples", "images",
            "compilations",
        )  # fmt: skip
        self.events.write(
            "sft", ready.step, **{name: stepped.metrics[name] for name in shown},
            bad=ready.bad, truncated=ready.truncated, seconds=seconds, waited_s=ready.waited_s,
            steps_total=self.config.run.steps,
        )  # fmt: skip
        for lost in ready.dropped:
            self.events.write("bad_media", ready.step, **asdict(lost))

    def evaluated(self, step: int, nll: float, tokens: float, is_last: bool) -> None:
        self.nll, self.tokens = self.nll + nll, self.tokens + tokens
        if is_last and self.events is not None:
            loss = self.nll / self.tokens if self.tokens else None
            self.events.write("sft_eval", step, loss=loss, trained_tokens=self.tokens)
            self.nll = self.tokens = 0.0

    def checkpoint(self, step: int, last: bool = False) -> None:
        self.saver.save(step, self.learner.forward.model, self.learner.optimizer, last)

    def finish(self) -> None:
        model = self.learner.forward.model
        if self.events is None:
            help_export(model)
        else:
            settings, target = self.config.model, Path(self.config.sft.output)
            export_checkpoint(Path(settings.path), target, model, DTYPES[settings.dtype])


@dataclass
class Parts:
    feed: Iterable[ReadyBatch]
    learner: Learner
    keeper: Keeper
    first_step: int
    batches: Batches | None = None
    """Where they come from; None on ranks other than 0."""


def run(parts: Parts) -> None:
    """Trains for the steps of the file and writes the checkpoint that it names."""
    step, steps = parts.first_step, parts.keeper.config.run.steps
    for ready in parts.feed:
        began = time.monotonic()
        if ready.held_out:
            nll, tokens = parts.learner.evaluate(ready)
            parts.keeper.evaluated(ready.step, nll, tokens, ready.is_last)
        else:
            stepped = parts.learner.step(ready)
            step = ready.step
            parts.keeper.report(ready, stepped, time.monotonic() - began)
            parts.keeper.checkpoint(step, last=step == steps)
        parts.learner.pulse.rest()
    parts.learner.pulse.mark("the export", LONG_S)
    parts.keeper.finish()
    parts.learner.pulse.rest()


def build(
    config: SftFile,
    run_dir: RunDir,
    ranks: Ranks = ALONE,
    lead: Lead | None = None,
    pulse: Pulse | None = None,
) -> Parts:
    """Of rank 0; with `lead` it hands out what the others compute."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = learner_of(config, store, ranks, imitates=True)
    deliver = alone if lead is None else from_all(lead)
    watch = watch_of(config, lead)
    saver, chosen = build_saver(config, run_dir, learner, deliver, watch())
    saver.checkpoints.clear()
    events = EventLog(run_dir.metrics, "trainer")
    for problem in chosen.refused:
        events.write("checkpoint_refused", chosen.step, problem=problem)
    learner.pulse = pulse or Pulse()
    renderer = load_renderer(
        config.model.path, store, learner.family, number_pictures=config.model.number_pictures
    )
    preparer = build_preparer(config.media, learner, store, sampled=False)
    source, size = _source(config, store), config.sft.batch_size
    batches = Batches(source, renderer, preparer, size, watch())
    hand_out = build_spread(lead, ranks, learner) if lead is not None else _keep_all
    feed = Ahead(_schedule(config, batches, chosen.step, hand_out, lead))
    keeper = Keeper(config, learner, saver, events)
    return Parts(feed, learner, keeper, chosen.step, batches)


def build_follower(
    config: SftFile, run_dir: RunDir, ranks: Ranks, follow: Follow, pulse: Pulse
) -> Parts:
    """Of a rank other than 0."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = learner_of(config, store, ranks, imitates=True)
    watch = watch_of(config, follow)
    saver, chosen = build_saver(config, run_dir, learner, to_lead(follow), watch())
    learner.pulse = pulse
    family = learner.family
    materializer = build_materializer(learner, store)
    feed = ShareFeed(follow, materializer, family.num_axes, chosen.step + 1, pulse=watch())
    return Parts(feed, learner, Keeper(config, learner, saver, None), chosen.step)


def _source(config: SftFile, store: MediaStore) -> Source:
    if config.data is not None:
        return open_conversations(config.data, config.media, store, config.run.seed)
    assert config.env is not None
    return Demonstrations(build_environment(config.env), store, config.run.seed)


def _schedule(
    config: SftFile,
    batches: Batches,
    done: int,
    hand_out: Callable[[ReadyBatch], ReadyBatch],
    lead: Lead | None,
) -> Iterator[ReadyBatch]:
    """Batches from the step after `done`, and what is held out where an evaluation is due."""
    steps, every = config.run.steps, config.sft.eval_every
    for step in range(done, steps + 1):
        if step > done:
            yield hand_out(batches.of_step(step))
        if step in (0, steps) or (every and step % every == 0):
            for ready in batches.held_out(step):
                yield hand_out(ready)
    if lead is not None:
        lead.over()


def _keep_all(ready: ReadyBatch) -> ReadyBatch:
    return ready
