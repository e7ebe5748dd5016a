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

from sightline.compute.model import MODEL_DTYPES
from sightline.config import SftFile
from sightline.envs.mix import build_environment
from sightline.errors import MediaError, MessageError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import Message
from sightline.render import Renderer
from sightline.render.protocol import Tools
from sightline.run import EventLog, RunDir
from sightline.trainer.bad_media import DroppedSample
from sightline.trainer.build import (
    build_distributor,
    build_materializer,
    build_preparer,
    build_run_learner,
    build_saver,
    build_watchdog_factory,
)
from sightline.trainer.checkpoint_saver import (
    CheckpointSaver,
    collect_from_ranks,
    deliver_alone,
    deliver_to_lead,
)
from sightline.trainer.conversations import (
    HELD_OUT,
    TRAIN,
    ConversationSource,
    Demonstrations,
    open_conversations,
)
from sightline.trainer.distribute import ShareFeed
from sightline.trainer.export import export_checkpoint, gather_for_export
from sightline.trainer.feed import BatchPrefetcher, BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner, StepResult
from sightline.trainer.ranks import SINGLE_RANK, FollowerChannel, LeadChannel, RankInfo
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample, Segment


@dataclass
class ConversationBatches:
    """Conversations as batches; the same step has the same one, in every process."""

    source: ConversationSource
    renderer: Renderer
    preparer: BatchPreparer
    size: int
    watchdog: StallWatchdog
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
        self.watchdog.mark(f"preparing step {step}")
        samples, lost = [], []
        for index in indices:
            try:
                found = self.source.conversation(index, split)
            except MediaError as error:
                if self.preparer.on_bad_image == "stop":
                    raise
                name = self.source.name(index, split)
                lost.append(DroppedSample(name, "", type(error).__name__, error.problem))
                continue
            samples.append(build_sample(found.messages, self.renderer, found.name, found.tools))
        ready = self.preparer.prepare(Batch(step, samples), "", lost)
        self.watchdog.rest()
        return ready


def build_sample(
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
        segments=[Segment(s.start, s.stop, node=i) for i, s in enumerate(rendered.trained)],
        items=items,
        slots=[Slot(slot.offset, slot.length, places[slot.item.key]) for slot in rendered.slots],
    )


@dataclass
class SftRunWriter:
    """What outlasts the process: checkpoints, metrics, and the model at the end."""

    config: SftFile
    learner: Learner
    saver: CheckpointSaver
    events: EventLog | None
    """None on ranks other than 0, which hand over their shards and write nothing."""
    nll: float = 0.0
    tokens: float = 0.0

    def report(self, ready: ReadyBatch, result: StepResult, seconds: float) -> None:
        if self.events is None:
            return
        shown = (
            "loss", "lr", "grad_norm", "tokens", "trained_tokens", "samples", "images",
            "compilations",
        )  # fmt: skip
        self.events.write(
            "sft", ready.step, **{name: result.metrics[name] for name in shown},
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
            gather_for_export(model)
        else:
            settings, target = self.config.model, Path(self.config.sft.output_dir)
            export_checkpoint(Path(settings.path), target, model, MODEL_DTYPES[settings.dtype])


@dataclass
class SftComponents:
    feed: Iterable[ReadyBatch]
    learner: Learner
    run_writer: SftRunWriter
    first_step: int
    batches: ConversationBatches | None = None
    """Where they come from; None on ranks other than 0."""


def run(components: SftComponents) -> None:
    """Trains for the steps of the file and writes the checkpoint that it names."""
    step, steps = components.first_step, components.run_writer.config.run.steps
    for ready in components.feed:
        began = time.monotonic()
        if ready.held_out:
            nll, tokens = components.learner.evaluate(ready)
            components.run_writer.evaluated(ready.step, nll, tokens, ready.is_last)
        else:
            result = components.learner.step(ready)
            step = ready.step
            components.run_writer.report(ready, result, time.monotonic() - began)
            components.run_writer.checkpoint(step, last=step == steps)
        components.learner.watchdog.rest()
    components.learner.watchdog.mark("the export", LONG_LIMIT_S)
    components.run_writer.finish()
    components.learner.watchdog.rest()


def build(
    config: SftFile,
    run_dir: RunDir,
    ranks: RankInfo = SINGLE_RANK,
    lead: LeadChannel | None = None,
    watchdog: StallWatchdog | None = None,
) -> SftComponents:
    """Of rank 0; with `lead` it hands out what the others compute."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_run_learner(config, store, ranks, supervised=True)
    deliver = deliver_alone if lead is None else collect_from_ranks(lead)
    watch = build_watchdog_factory(config, lead)
    saver, chosen = build_saver(config, run_dir, learner, deliver, watch())
    saver.checkpoints.clear()
    events = EventLog(run_dir.metrics, "trainer")
    for problem in chosen.refused:
        events.write("checkpoint_refused", chosen.step, problem=problem)
    learner.watchdog = watchdog or StallWatchdog()
    renderer = load_renderer(
        config.model.path, store, learner.family, number_images=config.model.number_images
    )
    preparer = build_preparer(config.media, learner, store, sampled=False)
    source, size = _open_source(config, store), config.sft.batch_size
    batches = ConversationBatches(source, renderer, preparer, size, watch())
    distribute = build_distributor(lead, ranks, learner) if lead is not None else _keep_all
    feed = BatchPrefetcher(_schedule_batches(config, batches, chosen.step, distribute, lead))
    run_writer = SftRunWriter(config, learner, saver, events)
    return SftComponents(feed, learner, run_writer, chosen.step, batches)


def build_follower(
    config: SftFile,
    run_dir: RunDir,
    ranks: RankInfo,
    follow: FollowerChannel,
    watchdog: StallWatchdog,
) -> SftComponents:
    """Of a rank other than 0."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_run_learner(config, store, ranks, supervised=True)
    watch = build_watchdog_factory(config, follow)
    saver, chosen = build_saver(config, run_dir, learner, deliver_to_lead(follow), watch())
    learner.watchdog = watchdog
    family = learner.family
    materializer = build_materializer(learner, store)
    feed = ShareFeed(follow, materializer, family.num_axes, chosen.step + 1, watchdog=watch())
    return SftComponents(feed, learner, SftRunWriter(config, learner, saver, None), chosen.step)


def _open_source(config: SftFile, store: MediaStore) -> ConversationSource:
    if config.data is not None:
        return open_conversations(config.data, config.media, store, config.run.seed)
    assert config.env is not None
    return Demonstrations(build_environment(config.env), store, config.run.seed)


def _schedule_batches(
    config: SftFile,
    batches: ConversationBatches,
    done: int,
    distribute: Callable[[ReadyBatch], ReadyBatch],
    lead: LeadChannel | None,
) -> Iterator[ReadyBatch]:
    """Batches from the step after `done`, and what is held out where an evaluation is due."""
    steps, every = config.run.steps, config.sft.eval_every
    for step in range(done, steps + 1):
        if step > done:
            yield distribute(batches.of_step(step))
        if step in (0, steps) or (every and step % every == 0):
            for ready in batches.held_out(step):
                yield distribute(ready)
    if lead is not None:
        lead.announce_end()


def _keep_all(ready: ReadyBatch) -> ReadyBatch:
    return ready
