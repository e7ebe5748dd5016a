"""Conversations that an engine samples, compared bit by bit with the trainer's logprobs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import making
import numpy as np
import torch
from serving import Client, Together

from sightline.compute.attention import build_attention_pattern
from sightline.compute.attention_exact import ExactPattern
from sightline.compute.model import MODEL_DTYPES, load_model
from sightline.families import load_family, load_renderer
from sightline.inference.torch_engine.kv_cache import DecodePattern, KVCache
from sightline.inference.torch_engine.row_table import StepPlan
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.generate import SamplingParams
from sightline.wire.sample import Batch, Sample, Segment


@dataclass
class Talk:
    """A conversation so far: its tokens, and which of them were sampled, with their logprobs."""

    tokens: list[int]
    slots: list[Slot]
    group: str
    segments: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def build_sample(self, name: str, temperature: float) -> Sample:
        items = list({slot.item.key: slot.item for slot in self.slots}.values())
        at = {item.key: i for i, item in enumerate(items)}
        trained = np.concatenate([np.arange(*segment) for segment in self.segments])
        draws = np.random.default_rng(len(trained))
        return Sample(
            trace_id=name,
            group_id=self.group,
            env="test",
            reward=0.0,
            token_ids=Array.of(self.tokens, "int32"),
            trained=Array.of(trained, "int32"),
            logprobs=Array.of(self.logprobs, "float32"),
            advantages=Array.of(draws.normal(size=len(trained)), "float32"),
            versions=Array.of(self.versions, "int32"),
            segments=[Segment(*ends, node=i) for i, ends in enumerate(self.segments)],
            items=items,
            slots=[
                Slot(s.offset, s.length, at[s.item.key], self.digests[s.item.key])
                for s in self.slots
            ],
            temperature=temperature,
        )


def play(
    client: Client,
    model: Path,
    store: MediaStore,
    groups: int = 3,
    group_size: int = 3,
    turns: int = 3,
    max_tokens: int = 24,
    temperature: float = 0.8,
    image_side: int = 0,
    between_turns: Any = lambda turn: None,
) -> list[Sample]:
    """Play groups that share a prompt, concurrently. Each turn shows one more image."""
    renderer, rng = load_renderer(model, store), random.Random(0)
    talks = []
    for i in range(groups):
        image = store.put(making.image(rng, image_side, image_side))
        shown = [image] if renderer.family.shows_media else []
        words = " ".join(rng.choices(making.WORDS, k=3 + 40 * (i % 3)))
        rendered = renderer.render([user(words, *shown)])
        talks += [
            Talk(list(rendered.token_ids), list(rendered.slots), f"g{i}") for _ in range(group_size)
        ]
    together = Together(client)
    for turn in range(turns):
        answers = [
            together.generate(
                talk.tokens,
                talk.slots,
                SamplingParams(
                    max_tokens=max_tokens + i % 5, temperature=temperature, seed=100 * i + turn
                ),
            )
            for i, talk in enumerate(talks)
        ]
        for talk, answer in zip(talks, answers, strict=True):
            choice = answer.result().choices[0]
            sightline = answer.result().sightline
            assert choice.logprobs is not None and choice.weight_versions and sightline is not None
            keys = [slot.item.key for slot in talk.slots]
            talk.digests.update(zip(keys, sightline.pixel_digests, strict=True))
            end = len(talk.tokens) + len(choice.token_ids)
            talk.segments.append((len(talk.tokens), end))
            talk.logprobs += [entry.logprob for entry in choice.logprobs.content]
            for span in choice.weight_versions:
                talk.versions += [int(span.version.split("-")[0])] * (span.end - span.start)
            talk.tokens += choice.token_ids
            if turn + 1 < turns:
                shown = [store.put(making.image(rng))] if renderer.family.shows_media else []
                more = renderer.render([user("And now?", *shown)])
                talk.slots += [slot.shift(len(talk.tokens)) for slot in more.slots]
                talk.tokens += more.token_ids
        between_turns(turn)
    return [talk.build_sample(f"t{i}", temperature) for i, talk in enumerate(talks)]


def prepare(
    learner: Learner, model: Path, store: MediaStore, samples: list[Sample], tokens: int, step: int
) -> ReadyBatch:
    """Pack the samples into micro-batches of at most `tokens` tokens."""
    materializer = Materializer(learner.family, store, max_bytes=1 << 28)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(tokens, 1 << 20))
    ready = preparer.prepare(Batch(step, samples), digest="").with_pixels()
    materializer.close()
    return ready


def compare(learner: Learner, ready: ReadyBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the logprobs of the current version's tokens at the sampler and at the trainer."""
    differences = []
    for micro_batch in ready.micro_batches:
        is_fresh = micro_batch.batch.versions.numpy() == ready.step - 1
        differences.append(
            (micro_batch.batch.logprobs.numpy()[is_fresh], learner.score(micro_batch)[is_fresh])
        )
    sampler, trainer = (np.concatenate(arrays) for arrays in zip(*differences, strict=True))
    return sampler, trainer


class Passes:
    """Hidden states of one sequence, by the trainer's pass and by those of an engine."""

    def __init__(
        self,
        model: Path,
        exact: bool,
        device: str = "cpu",
        dtype: str = "float32",
        length: int = 150,
    ) -> None:
        self.exact, self.length = exact, length
        self.device, self.dtype = torch.device(device), MODEL_DTYPES[dtype]
        family = load_family(model)
        self.forward = load_model(model, family, device, dtype, (device, dtype) if exact else None)
        self.ids = torch.arange(length, device=self.device) * 7 % 200
        positions, _ = family.positions(length, ())
        self.positions = torch.from_numpy(positions).long().to(self.device)

    def _compute(self, index: np.ndarray, pattern: Any) -> torch.Tensor:
        at = torch.from_numpy(index).to(self.device)
        token_ids, positions = self.ids[at][None], self.positions[:, at][:, None]
        with torch.no_grad():
            return self.forward.hidden(token_ids, positions, None, None, pattern)[0]

    def train(self, before: int = 0, after: int = 0) -> torch.Tensor:
        """The sequence in a pack, between two others."""
        lengths = [n for n in (before, self.length, after) if n]
        index = np.concatenate([np.arange(n) for n in lengths]) % self.length
        pattern: Any
        if self.exact:
            pattern = ExactPattern(lengths, self.device, self.dtype)
        else:
            ends = np.repeat(np.cumsum(lengths), lengths)
            pattern = build_attention_pattern(ends, self.device, self.dtype)
        return self._compute(index, pattern)[before : before + self.length]

    def train_in_tree(self, shared: int) -> torch.Tensor:
        """Compute the sequence as the second branch of a tree."""
        branch = (self.length - shared) // 2
        index = np.concatenate([np.arange(shared + branch), np.arange(shared, self.length)])
        ends = np.full(len(index), len(index))
        ends[shared : shared + branch] = shared + branch
        output = self._compute(index, build_attention_pattern(ends, self.device, self.dtype))
        return torch.cat([output[:shared], output[shared + branch :]])

    def open(self) -> KVCache:
        return KVCache(8, 2048, self.device, self.dtype, exact=self.exact)

    def prefill(
        self, kv: KVCache, counts: list[int], row: int = 0, start: int = 0, beside: int = 0
    ) -> torch.Tensor:
        """Prefill in chunks of `counts` tokens, and start other rows in each chunk's step."""
        outputs = []
        for count in counts:
            rows = np.array([row, *range(row + 1, row + 1 + beside)])
            starts = np.array([start, *[0] * beside])
            tokens = np.array([count, *[5 + 11 * i for i in range(beside)]])
            plan = StepPlan(rows, starts, tokens, np.ones(len(rows), dtype=bool))
            outputs.append(self._compute(plan.flat()[1], kv.build_pattern(plan))[:count])
            start += count
        return torch.cat(outputs)

    def decode(self, kv: KVCache, start: int, idle: int = 0) -> torch.Tensor:
        """Decode token by token from `start`, in a batch with `idle` unused places."""
        outputs = []
        for at in range(start, self.length):
            plan = StepPlan(*(np.array([x]) for x in (0, at, 1, True)))
            kv.reserve(plan)
            pages = np.zeros((1 + idle, 4096 // 64), np.int32)
            seq_lens = np.zeros(1 + idle, np.int32)
            pages[0, : kv.block_tables.shape[1]] = kv.block_tables[0]
            seq_lens[0] = at + 1
            inputs = (torch.from_numpy(x).to(self.device) for x in (pages, seq_lens))
            index = np.array([at, *[0] * idle])
            outputs.append(self._compute(index, DecodePattern(kv, *inputs))[:1])
        return torch.cat(outputs)
