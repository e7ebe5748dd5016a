"""A few rollouts for the report, early ones beside late ones.

Only the first and the last trace file of a run are opened, and each only as far as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import SightlineError
from sightline.message import ImagePart, TextPart
from sightline.render import Tokenizer
from sightline.run.run_dir import RunDir
from sightline.trace import Node, Trace, read_traces
from sightline.view import formatting
from sightline.view.gallery import Gallery, GalleryImage

ROLLOUTS_PER_SECTION = 3
_MOST_MESSAGES = 12
_MOST_CHARS = 4000
_MOST_TOKENS = 600
_MOST_FRAMES = 8


@dataclass(frozen=True, slots=True)
class ReportToken:
    text: str
    logprob: float
    version: int

    @property
    def probability(self) -> float:
        return math.exp(min(0.0, self.logprob))

    @property
    def is_special(self) -> bool:
        """Whether it is spelled as special tokens are, in every chat format that we know."""
        return self.text.startswith("<|") and self.text.endswith("|>")


@dataclass(frozen=True, slots=True)
class ReportMessage:
    """One message as the report shows it."""

    role: str
    parts: list[str | GalleryImage]
    tokens: list[ReportToken]
    """What was sampled, token by token; empty for messages of the environment."""
    num_left_out: int = 0
    """Sampled tokens that are not shown."""
    credit: float | None = None
    """What the turn earned, where the environment says so."""


@dataclass(frozen=True, slots=True)
class ReportRollout:
    """One rollout as the report shows it."""

    title: str
    reward: float | None
    parts: dict[str, float]
    error: str
    messages: list[ReportMessage | int]
    """A number stands for so many messages that are left out."""


@dataclass(frozen=True, slots=True)
class RolloutSection:
    title: str
    rollouts: list[ReportRollout]
    problem: str = ""
    """Why there are none, or not all."""


def pick_rollouts(
    run_dir: RunDir, gallery: Gallery, tokenizer: Tokenizer | None
) -> list[RolloutSection]:
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
    return [_read_section(title, file, gallery, tokenizer) for title, file in titled]


def _step_of(file: Path) -> str:
    return file.stem.removeprefix("step_").lstrip("0") or "0"


def _read_section(
    title: str, file: Path, gallery: Gallery, tokenizer: Tokenizer | None
) -> RolloutSection:
    shown: list[ReportRollout] = []
    try:
        for trace in _first_of_each_group(file):
            shown.append(_build_rollout(trace, gallery, tokenizer))
            if len(shown) == ROLLOUTS_PER_SECTION:
                break
    except (SightlineError, OSError) as error:
        return RolloutSection(title, shown, formatting.clean(error))
    return RolloutSection(title, shown)


def _first_of_each_group(file: Path) -> Iterator[Trace]:
    """The first rollout of each group: those of one group look much alike."""
    groups: set[str] = set()
    for trace in read_traces(file):
        name = trace.group_id or trace.id
        if name not in groups and trace.nodes:
            groups.add(name)
            yield trace


def _build_rollout(trace: Trace, gallery: Gallery, tokenizer: Tokenizer | None) -> ReportRollout:
    turns = trace.turns
    leaf = turns[-1].id if turns else len(trace.nodes) - 1
    nodes = [trace.nodes[i] for i in trace.path(leaf)]
    credits = dict(zip((node.id for node in turns), trace.per_turn or (), strict=False))
    branches = len(trace.branches())
    title = f"task {trace.task}" + (f", one of {branches} branches" if branches > 1 else "")

    def build_message(node: Node) -> ReportMessage:
        tokens = _tokens(node, tokenizer) if tokenizer else []
        left_out = node.num_sampled - len(tokens) if tokens else 0
        return ReportMessage(
            node.message.role, _parts(node, gallery), tokens, left_out, credits.get(node.id)
        )

    return ReportRollout(
        title, trace.reward, trace.rewards, trace.error, _shorten_messages(nodes, build_message)
    )


def _shorten_messages(
    nodes: list[Node], build_message: Callable[[Node], ReportMessage]
) -> list[ReportMessage | int]:
    """All messages of a short conversation, the two ends of a long one."""
    if len(nodes) <= _MOST_MESSAGES:
        return [build_message(node) for node in nodes]
    end = _MOST_MESSAGES // 2
    first, last = nodes[:end], nodes[-end:]
    return [*map(build_message, first), len(nodes) - 2 * end, *map(build_message, last)]


def _parts(node: Node, gallery: Gallery) -> list[str | GalleryImage]:
    message = node.message
    parts: list[str | GalleryImage] = []
    if message.reasoning:
        parts.append(_shorten_text(message.reasoning))
    for part in message.content:
        if isinstance(part, ImagePart):
            parts.append(gallery.get_image(part.ref))
        elif isinstance(part, TextPart):
            parts.append(_shorten_text(part.text))
        elif part.ref is not None:
            parts.append(f"[video {part.ref.digest[:12]}, {part.ref.num_frames} frames]")
        else:
            parts.append(f"[video of {len(part.frames)} images]")
            parts += [gallery.get_image(frame.ref) for frame in part.frames[:_MOST_FRAMES]]
    parts += [_shorten_text(f"{call.name}({call.arguments})") for call in message.tool_calls]
    return parts


def _shorten_text(text: str) -> str:
    left_out = len(text) - _MOST_CHARS
    return text if left_out <= 0 else f"{text[:_MOST_CHARS]} … {left_out} characters left out"


def _tokens(node: Node, tokenizer: Tokenizer) -> list[ReportToken]:
    first = node.sampled_start
    ids = node.token_ids.numpy()[first : first + _MOST_TOKENS].tolist()
    logprobs = node.logprobs.numpy()[:_MOST_TOKENS].tolist()
    versions = [span.version for span in node.versions for _ in range(span.start, span.stop)]
    return [
        ReportToken(tokenizer.decode([token_id]), logprob, version)
        for token_id, logprob, version in zip(ids, logprobs, versions, strict=False)
    ]
