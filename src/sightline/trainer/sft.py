"""Supervised training: conversations to imitate, as batches for the trainer's loop.

    source --conversations--> prefetcher (own thread): render, materialize, pack --ready k--> loop

Only the assistant's tokens train. A batch is a function of its step, so a run can resume from its
checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
from msgspec import structs

from sightline.config import SftFile
from sightline.envs.protocol import build_environment
from sightline.errors import MediaError, MessageError
from sightline.media import ImageIngestor, MediaStore
from sightline.message import Message
from sightline.render import Renderer
from sightline.render.protocol import Tools
from sightline.run.run_dir import RunDir
from sightline.trace import Node, Trace, write_traces
from sightline.trace.node import int32_array
from sightline.trainer.bad_media import DroppedSample
from sightline.trainer.conversations import (
    HELD_OUT,
    TRAIN,
    ConversationSource,
    Demonstrations,
    FileConversations,
    TrainingConversation,
)
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.watchdog import StallWatchdog
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample, Segment

MAX_STORED = 8
"""The number of conversations per step that are stored for inspection."""


@dataclass
class ConversationBatches:
    """Iterates over batches of conversations, from the step after `done`.

    A step has the same batch in every process. Held-out batches follow when an evaluation is due.
    """

    source: ConversationSource
    renderer: Renderer
    preparer: BatchPreparer
    config: SftFile
    done: int = 0
    """Step of the checkpoint that the run resumes from."""
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    """Monitors the thread that iterates: the loop's watchdog is idle while it waits."""
    stop: Event = field(default_factory=Event)
    """Set to end the run before its next step."""
    run_dir: RunDir | None = None
    """Stores a few conversations of steps 1, 2, 4, 8 and so on, for inspection."""

    def __iter__(self) -> Iterator[ReadyBatch]:
        steps, every = self.config.run.steps, self.config.sft.eval_every
        size = self.config.sft.batch_size
        for step in range(self.done, steps + 1):
            if self.stop.is_set():
                return
            if step > self.done:
                yield self._prepare(step, range((step - 1) * size, step * size), TRAIN)
            if step in (0, steps) or (every and step % every == 0):
                yield from self.held_out(step)

    def held_out(self, step: int) -> Iterator[ReadyBatch]:
        """Yield all held-out conversations, to evaluate after `step`."""
        num, size = self.source.num_held_out, self.config.sft.batch_size
        for first in range(0, num, size):
            ready = self._prepare(step, range(num)[first : first + size], HELD_OUT)
            yield replace(ready, held_out=True, is_last=first + size >= num)

    def _prepare(self, step: int, indices: Iterable[int], split: str) -> ReadyBatch:
        self.watchdog.enter(f"preparing step {step}")
        samples, lost, traces = list[Sample](), list[DroppedSample](), list[Trace]()
        stores_traces = self.run_dir is not None and split == TRAIN and step.bit_count() == 1
        for index in indices:
            try:
                conversation = self.source.conversation(index, split)
            except MediaError as error:
                name = self.source.name(index, split)
                lost.append(DroppedSample(name, "", type(error).__name__, error.problem))
                continue
            sample = build_sample(
                conversation.messages, self.renderer, conversation.name, conversation.tools
            )
            # Held-out loss is that of the better conversation.
            if conversation.rejected is not None and split == TRAIN:
                samples += self._build_pair(sample, conversation)
            else:
                samples.append(sample)
            if stores_traces and len(traces) < MAX_STORED:
                traces.append(build_trace(conversation, self.renderer, index))
        if traces and self.run_dir is not None:
            write_traces(self.run_dir.traces_of(step), traces)
        ready = self.preparer.prepare(Batch(step, samples), "", lost)
        self.watchdog.idle()
        return ready

    def _build_pair(self, chosen: Sample, conversation: TrainingConversation) -> list[Sample]:
        """Return a pair as a group of two rollouts, the better one with reward 1."""
        assert conversation.rejected is not None
        name = f"{conversation.name}, rejected"
        rejected = build_sample(conversation.rejected, self.renderer, name, conversation.tools)
        return [
            structs.replace(sample, group_id=conversation.name, reward=reward, advantages=None)
            for sample, reward in ((chosen, 1.0), (rejected, 0.0))
        ]


def open_source(config: SftFile, store: MediaStore) -> ConversationSource:
    """Open the conversations of `[data]`, or the demonstrations of `[env]`."""
    if config.data is not None:
        ingestor = ImageIngestor(store, config.media.file_roots, config.media.http_hosts)
        return FileConversations(config.data, store.put, ingestor, config.run.seed)
    assert config.env is not None
    return Demonstrations(build_environment(config.env), store, config.run.seed)


def build_sample(
    messages: list[Message], renderer: Renderer, name: str, tools: Tools | None = None
) -> Sample:
    """Turn a conversation into a sample that trains the assistant's tokens."""
    rendered = renderer.render(messages, tools, generation_prompt=False)
    if not rendered.trained:
        raise MessageError(f"{name}: the assistant says nothing", "remove the conversation")
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
        segments=[Segment(s.start, s.stop, node=i, turn=i) for i, s in enumerate(rendered.trained)],
        items=items,
        slots=[Slot(slot.offset, slot.length, places[slot.item.key]) for slot in rendered.slots],
    )


def build_trace(conversation: TrainingConversation, renderer: Renderer, index: int) -> Trace:
    """Return the conversation as a trace for the dashboard, with no sampled token."""
    rendered = renderer.render(conversation.messages, conversation.tools, generation_prompt=False)
    trace = Trace(id=conversation.name.replace(" ", "-"), env="sft", task=index)
    for i, (message, span) in enumerate(zip(conversation.messages, rendered.spans, strict=True)):
        ids = int32_array(rendered.token_ids[span.start : span.stop])
        slots = tuple(
            Slot(slot.offset - span.start, slot.length, slot.item)
            for slot in rendered.slots
            if span.start <= slot.offset < span.stop
        )
        trace.add(Node(i, i - 1, message, ids, sampled_start=len(ids), slots=slots))
    return trace
