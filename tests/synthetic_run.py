"""A realistic run directory of any size, for benchmarks, tests and screenshots.

Nothing is trained. Rollouts repeat a few hundred conversations, so that 100,000 are written within
seconds. Rewards rise and some rollouts break. The mismatch grows with a token's distance from its
image.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
from PIL import Image, ImageDraw

from sightline.media import MediaRef, MediaStore
from sightline.message import Message, TextPart, ToolCall, user
from sightline.run.run_dir import RunDir
from sightline.trace import Node, PolicySpan, Trace, write_traces
from sightline.trace.node import float32_array, int32_array
from sightline.wire import Array, MediaItem, Slot
from sightline.wire.event import Event
from sightline.wire.file import append_line
from sightline.wire.micro_batch import StepScores, TokenOrigin

START_TIME = 1_790_000_000.0
WORDS = (
    "the", "page", "shows", "a", "red", "blue", "green", "button", "field", "menu", "list", "row",
    "and", "I", "click", "scroll", "type", "search", "open", "close", "it", "is", "at", "top",
    "bottom", "left", "right", "of", "table", "total", "price", "order", "confirm", "cancel",
    "done",
)  # fmt: skip
SIZES = ((320, 208), (416, 240), (240, 320), (640, 400))
FACTOR = 16
"""Pixels of a token, along each side."""
NUM_TURNS = 3
NUM_SAMPLED = 10


@dataclass(frozen=True, slots=True)
class SyntheticSize:
    steps: int = 200
    rollouts_per_step: int = 500
    images: int = 240
    conversations: int = 300
    group_size: int = 10


class SyntheticRun:
    """A synthetic run that is written a step at a time."""

    def __init__(self, path: Path, size: SyntheticSize | None = None, seed: int = 0) -> None:
        self.size = size or SyntheticSize()
        self.run_dir = RunDir(path)
        self.run_dir.make()
        self.steps = 0
        self._rng = random.Random(seed)
        _write_config(self.run_dir, self.size)
        store = MediaStore(self.run_dir.media)
        refs = [store.put(_draw_image(self._rng, i)) for i in range(self.size.images)]
        self._conversations = [
            _build_conversation(self._rng, refs) for _ in range(self.size.conversations)
        ]
        self._verdict_totals: Counter[str] = Counter()

    def write_step(self) -> None:
        self.steps += 1
        step, size, rng = self.steps, self.size, self._rng
        skill = 1 - math.exp(-step / (0.35 * size.steps))
        versions = {step - 1, max(0, step - 2)}
        dated = [
            [_set_version(node, version) for node in conversation]
            for version in versions
            for conversation in rng.sample(self._conversations, min(40, len(self._conversations)))
        ]
        traces, verdicts = list[Trace](), dict[str, list[str]]()
        for number in range(size.rollouts_per_step):
            trace, verdict = _build_rollout(step, number, size, rng.choice(dated), skill, rng)
            traces.append(trace)
            verdicts.setdefault(verdict, []).append(trace.id)
        append_line(
            self.run_dir.verdicts, json.dumps({"step": step, "verdicts": verdicts}).encode()
        )
        write_traces(self.run_dir.traces_of(step), traces)
        trained = set(verdicts.get("train", []))
        scores = build_scores(step, [trace for trace in traces if trace.id in trained])
        self.run_dir.scores_of(step).write_bytes(scores.to_bytes())
        self._verdict_totals.update({verdict: len(names) for verdict, names in verdicts.items()})
        _write_events(self.run_dir, step, size, traces, skill, self._verdict_totals)


def write_synthetic_run(path: Path, size: SyntheticSize | None = None, seed: int = 0) -> RunDir:
    run = SyntheticRun(path, size, seed)
    for _ in range(run.size.steps):
        run.write_step()
    return run.run_dir


def _write_config(run_dir: RunDir, size: SyntheticSize) -> None:
    checkpoint = run_dir.path / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    vocabulary = {"<image>": 0, "<turn>": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<turn>")
    tokenizers.Tokenizer(model).save(str(checkpoint / "tokenizer.json"))
    run_dir.config.write_text(
        f'[run]\nname = "synthetic"\nsteps = {size.steps}\nseed = 0\n\n[env]\nname = "shop"\n\n'
        f"[model]\npath = {json.dumps(str(checkpoint))}\n\n[trainer]\nlr = 1e-6\n"
    )


def _draw_image(rng: random.Random, number: int) -> Image.Image:
    """Draw a page that resembles a shop."""
    width, height = SIZES[number % len(SIZES)]
    image = Image.new("RGB", (width, height), (250, 250, 248))
    draw = ImageDraw.Draw(image)
    hue = tuple(rng.randrange(40, 200) for _ in range(3))
    draw.rectangle((0, 0, width, 28), fill=hue)
    draw.text((8, 8), f"shop / {number}", fill="white")
    for i in range(rng.randrange(3, 8)):
        top = 38 + i * 24
        draw.rectangle((10, top, width - 10 - rng.randrange(100), top + 16), fill=(228, 230, 234))
        draw.text((14, top + 2), " ".join(rng.choices(WORDS, k=4)), fill=(60, 60, 60))
    left, top = rng.randrange(width - 70), rng.randrange(30, height - 24)
    draw.rounded_rectangle((left, top, left + 60, top + 20), 4, fill=hue)
    return image


def _build_conversation(rng: random.Random, refs: list[MediaRef]) -> list[Node]:
    """Return turns with one image each. In one of eight, a turn is asked again, which forks."""
    nodes: list[Node] = []
    parent = -1
    forks = rng.random() < 1 / 8
    for turn in range(NUM_TURNS):
        user_node = _build_user_node(rng, nodes, parent, rng.choice(refs), turn)
        nodes.append(user_node)
        nodes.append(_build_assistant_node(rng, nodes, user_node.id, turn))
        parent = nodes[-1].id
        if forks and turn == 1:
            nodes.append(_build_assistant_node(rng, nodes, user_node.id, turn))
            parent = nodes[-1].id
    return nodes


def _build_user_node(
    rng: random.Random, nodes: list[Node], parent: int, ref: MediaRef, turn: int
) -> Node:
    words = rng.choices(range(len(WORDS)), k=8)
    rows, columns = ref.height // FACTOR, ref.width // FACTOR
    item = MediaItem(ref=ref, family="synthetic", grid=(1, 2 * rows, 2 * columns), fingerprint="f")
    text = " ".join(WORDS[i] for i in words)
    ids = [1, *[0] * (rows * columns), *(i + 2 for i in words)]
    return Node(
        id=len(nodes),
        parent=parent,
        message=user(ref, text if turn else f"Find the product and order it: {text}."),
        token_ids=int32_array(ids),
        sampled_start=len(ids),
        slots=(Slot(1, rows * columns, item, ref.digest[:32]),),
    )


def _build_assistant_node(rng: random.Random, nodes: list[Node], parent: int, turn: int) -> Node:
    words = rng.choices(range(len(WORDS)), k=NUM_SAMPLED - 1)
    text = " ".join(WORDS[i] for i in words)
    point = {"x": rng.randrange(320), "y": rng.randrange(200)}
    call = ToolCall(name="click", arguments=json.dumps(point))
    return Node(
        id=len(nodes),
        parent=parent,
        message=Message(
            role="assistant",
            content=(TextPart(text),),
            tool_calls=(call,) if turn < NUM_TURNS - 1 else (),
        ),
        token_ids=int32_array([1, *(i + 2 for i in words), 1]),
        sampled_start=1,
        logprobs=float32_array([-rng.expovariate(1.5) for _ in range(NUM_SAMPLED)]),
        versions=(PolicySpan(version=0, epoch=0, start=0, stop=NUM_SAMPLED),),
        finish_reason="stop",
    )


def _set_version(node: Node, version: int) -> Node:
    if not node.is_turn:
        return node
    spans = (PolicySpan(version=version, epoch=0, start=0, stop=node.num_sampled),)
    return msgspec.structs.replace(node, versions=spans)


def _build_rollout(
    step: int, number: int, size: SyntheticSize, nodes: list[Node], skill: float, rng: random.Random
) -> tuple[Trace, str]:
    group = (step - 1) * (size.rollouts_per_step // size.group_size) + number // size.group_size
    reward = round(min(1.0, max(0.0, rng.gauss(skill, 0.25))), 3)
    luck = rng.random()
    bounds = {"broken": 0.01, "stale": 0.02, "no_signal": 0.1, "train": 1.0}
    verdict = next(name for name, bound in bounds.items() if luck < bound)
    began = START_TIME + 20 * step
    return (
        Trace(
            id=f"g{group}.{number % size.group_size}",
            group_id=f"g{group}",
            env="shop" if group % 4 else "forms",
            task=group,
            nodes=nodes,
            reward=None if verdict == "broken" else reward,
            rewards={} if verdict == "broken" else {"found": reward, "steps": -0.01 * len(nodes)},
            error="MediaMissing: no store root holds the image" if verdict == "broken" else "",
            error_kind="MediaMissing" if verdict == "broken" else "",
            forks={"resampled": 1} if len(nodes) > 2 * NUM_TURNS else {},
            started=began,
            ended=began + rng.uniform(3, 15),
        ),
        verdict,
    )


def build_scores(step: int, traces: list[Trace]) -> StepScores:
    noise = np.random.default_rng(step)
    origins, sampler, advantages = list[TokenOrigin](), list[np.ndarray](), list[float]()
    at = 0
    for trace in traces:
        for node in trace.turns:
            origins.append(TokenOrigin(at, at + node.num_sampled, node=node.id, trace_id=trace.id))
            sampler.append(node.logprobs.numpy())
            advantages += [(trace.reward or 0.0) - 0.5] * node.num_sampled
            at += node.num_sampled
    old = np.concatenate(sampler)
    places = np.tile(np.arange(NUM_SAMPLED), len(origins))
    drift = noise.normal(0, 0.002 * (1 + places))
    return StepScores(
        step=step,
        origins=origins,
        logprobs=Array.of(old + drift, "float32"),
        ratios=Array.of(np.exp(drift), "float32"),
        advantages=Array.of(advantages, "float32"),
    )


def _write_events(
    run_dir: RunDir,
    step: int,
    size: SyntheticSize,
    traces: list[Trace],
    skill: float,
    totals: Counter[str],
) -> None:
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    num_images = NUM_TURNS * size.rollouts_per_step
    at = START_TIME + 20 * step
    values = {
        "steps_total": size.steps,
        "reward": sum(rewards) / max(len(rewards), 1),
        "parts": {"found": sum(rewards) / max(len(rewards), 1)},
        "envs": {
            name: {"reward": float(np.mean([t.reward or 0.0 for t in traces if t.env == name]))}
            for name in sorted({trace.env for trace in traces})
        },
        "lag_mean": 0.5,
        "lag_max": 1,
        "verdicts": dict(totals),
        "bad_media": totals["broken"],
        "tokens_per_s": 2400 + 300 * math.sin(step / 7),
        "images_shown": num_images * step,
        "images_stored": size.images,
        "seconds": 20.0,
        "eta_s": 20.0 * (size.steps - step),
        "in_flight": 40 + step % 9,
        "waiting": step % 5,
        "groups_ahead": 6,
    }
    trained = {
        "loss": 0.02 * math.cos(step / 9),
        "entropy": 1.4 * (1 - 0.6 * skill),
        "mismatch_kl": 1.2e-4 * (1 + 0.3 * math.sin(step)),
        "lag_kl": 2.0e-3,
        "grad_norm": 0.4 + 0.1 * math.sin(step / 3),
        "clip_fraction": 0.004,
        "seconds": {"wait": 4.0, "materialize": 1.5, "compute": 9.0, "publish": 0.8},
    }
    for kind, process, table in (("step", "orchestrator", values), ("train", "trainer", trained)):
        event = Event(time=at, process=process, kind=kind, step=step, values=table)
        append_line(run_dir.metrics, msgspec.json.encode(event))
