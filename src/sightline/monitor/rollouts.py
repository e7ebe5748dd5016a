"""A few rollouts for the report, early ones beside late ones.

Only the first and the last trace file of a run are opened, and each only as far as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import SightlineError
from sightline.message import ImagePart
from sightline.monitor import spell
from sightline.monitor.gallery import Gallery, Picture
from sightline.monitor.run_dir import RunDir
from sightline.render import Tokenizer
from sightline.trace import Node, Trace, read_traces

NUM_EACH = 3
_MOST_MESSAGES = 12
_MOST_CHARS = 4000
_MOST_TOKENS = 600


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    logprob: float
    version: int

    @property
    def probability(self) -> float:
        return math.exp(min(0.0, self.logprob))


@dataclass(frozen=True, slots=True)
class Said:
    """One message as the report shows it."""

    role: str
    parts: list[str | Picture]
    tokens: list[Token]
    """What was sampled, token by token; empty for messages of the environment."""
    num_sampled: int
    credit: float | None = None
    """What the turn earned, where the environment says so."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One rollout as the report shows it."""

    title: str
    reward: float | None
    parts: dict[str, float]
    error: str
    messages: list[Said | int]
    """A number stands for so many messages that are left out."""


@dataclass(frozen=True, slots=True)
class Shelf:
    title: str
    rollouts: list[Shown]
    problem: str = ""
    """Why there are none, or not all."""


def pick_rollouts(run_dir: RunDir, gallery: Gallery, tokenizer: Tokenizer | None) -> list[Shelf]:
    """The first rollouts and the last ones; evaluations where no step left any."""
    files = sorted(run_dir.traces.glob("step_*.msgpack"))
    if files:
        chosen = [files[0], files[-1]] if len(files) > 1 else files
        titled = [(f"Step {_step_of(file)}", file) for file in chosen]
    else:
        titled = [
            (f"Evaluation, {name}", file)
            for name in ("start", "final")
            for file in sorted(run_dir.traces.glob(f"eval_{name}_*.msgpack"))[:1]
        ]
    return [_shelf(title, file, gallery, tokenizer) for title, file in titled]


def _step_of(file: Path) -> str:
    return file.stem.removeprefix("step_").lstrip("0") or "0"


def _shelf(title: str, file: Path, gallery: Gallery, tokenizer: Tokenizer | None) -> Shelf:
    shown: list[Shown] = []
    try:
        for trace in _one_a_group(file):
            shown.append(_show(trace, gallery, tokenizer))
            if len(shown) == NUM_EACH:
                break
    except (SightlineError, OSError) as error:
        return Shelf(title, shown, spell.clean(error))
    return Shelf(title, shown)


def _one_a_group(file: Path) -> Iterator[Trace]:
    """The first rollout of each group: those of one group look much alike."""
    groups: set[str] = set()
    for trace in read_traces(file):
        name = trace.group_id or trace.id
        if name not in groups and trace.nodes:
            groups.add(name)
            yield trace


def _show(trace: Trace, gallery: Gallery, tokenizer: Tokenizer | None) -> Shown:
    turns = trace.turns
    leaf = turns[-1].id if turns else len(trace.nodes) - 1
    nodes = [trace.nodes[i] for i in trace.path(leaf)]
    credits = dict(zip((node.id for node in turns), trace.per_turn or (), strict=False))
    branches = len(trace.branches())
    title = f"task {trace.task}" + (f", one of {branches} branches" if branches > 1 else "")

    def said(node: Node) -> Said:
        return Said(
            node.message.role,
            _parts(node, gallery),
            _tokens(node, tokenizer) if tokenizer else [],
            node.num_sampled,
            credits.get(node.id),
        )

    return Shown(title, trace.reward, trace.rewards, trace.error, _shorten(nodes, said))


def _shorten(nodes: list[Node], said: Callable[[Node], Said]) -> list[Said | int]:
    """All messages of a short conversation, the two ends of a long one."""
    if len(nodes) <= _MOST_MESSAGES:
        return [said(node) for node in nodes]
    end = _MOST_MESSAGES // 2
    first, last = nodes[:end], nodes[-end:]
    return [*map(said, first), len(nodes) - 2 * end, *map(said, last)]


def _parts(node: Node, gallery: Gallery) -> list[str | Picture]:
    message = node.message
    parts: list[str | Picture] = []
    if message.reasoning:
        parts.append(_cut(message.reasoning))
    for part in message.content:
        if isinstance(part, ImagePart):
            parts.append(gallery.picture(part.ref))
        else:
            parts.append(_cut(part.text))
    parts += [_cut(f"{call.name}({call.arguments})") for call in message.tool_calls]
    return parts


def _cut(text: str) -> str:
    left_out = len(text) - _MOST_CHARS
    return text if left_out <= 0 else f"{text[:_MOST_CHARS]} … {left_out} characters left out"


def _tokens(node: Node, tokenizer: Tokenizer) -> list[Token]:
    first = node.sampled_start
    ids = node.token_ids.numpy()[first : first + _MOST_TOKENS].tolist()
    logprobs = node.logprobs.numpy()[:_MOST_TOKENS].tolist()
    versions = [span.version for span in node.versions for _ in range(span.start, span.stop)]
    return [
        Token(tokenizer.decode([token_id]), logprob, version)
        for token_id, logprob, version in zip(ids, logprobs, versions, strict=False)
    ]
