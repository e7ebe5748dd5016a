"""Data for the rollout page: messages, graph, images, and the tokens of single nodes.

Numbers may be infinite or NaN. The answer's JSON has null in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sightline.errors import SightlineError
from sightline.message import ImagePart, TextPart, VideoPart
from sightline.regular_file import read_bytes
from sightline.trace import Node, Trace
from sightline.view.dashboard import queries, trace_files
from sightline.view.dashboard.run_view import RunView
from sightline.view.transcript import take_steps
from sightline.wire import Slot
from sightline.wire.micro_batch import StepScores

MAX_TOKENS = 4096
"""Maximum number of a node's tokens in one answer."""
MAX_CHARS = 200_000
"""Maximum number of a text's characters in one answer."""
_COPIED = (
    "id", "env", "task", "split", "reward", "rewards", "temperature", "truncated", "error",
    "error_kind", "forks",
)  # fmt: skip
"""Values that are a trace's attributes."""


@dataclass(frozen=True, slots=True)
class NodeScores:
    """The trainer's scores for a node's sampled tokens."""

    logprobs: np.ndarray
    ratios: np.ndarray
    advantages: np.ndarray

    def kl(self, node: Node) -> np.ndarray:
        log_ratio = self.logprobs.astype(np.float64) - node.logprobs.numpy()
        return np.expm1(log_ratio) - log_ratio


def find_trace(run: RunView, file: str, number: int) -> tuple[dict[str, Any], Trace] | None:
    """Return a rollout's row in the index and its trace."""
    row = run.index.query(queries.find_rollout, file, number)
    if row is None:
        return None
    return row, trace_files.read_trace(run.run_dir.traces / row["file"], row["start"], row["size"])


def describe_rollout(run: RunView, file: str, number: int) -> dict[str, Any] | None:
    match = find_trace(run, file, number)
    if match is None:
        return None
    row, trace = match
    around = run.index.query(queries.find_neighbours, file, number)
    scored = read_node_scores(run, row["step"], trace)
    credits = dict(zip((node.id for node in trace.turns), trace.per_turn or (), strict=False))
    return {
        **{key: row[key] for key in ("file", "number", "step", "verdict", "lag", "kl", "seconds")},
        **{name: getattr(trace, name) for name in _COPIED},
        "group": trace.group_id,
        "seed": str(trace.seed),
        "door_errors": trace.refused_requests,
        "toolsets": [toolset[:MAX_CHARS] for toolset in trace.toolsets],
        "nodes": [_describe_node(run, node, credits.get(node.id), scored) for node in trace.nodes],
        "branches": trace.branches(),
        "neighbours": around,
    }


def _describe_node(
    run: RunView, node: Node, credit: float | None, scored: dict[int, NodeScores]
) -> dict[str, Any]:
    message = node.message
    slots = iter(node.slots)
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, ImagePart):
            parts.append(_describe_image(run, part, next(slots, None)))
        elif isinstance(part, VideoPart):
            parts.append(_describe_video(run, part, take_steps(slots)))
        elif isinstance(part, TextPart):
            parts.append({"text": part.text[:MAX_CHARS], "cut": len(part.text) > MAX_CHARS})
    score = scored.get(node.id)
    return {
        "id": node.id,
        "parent": node.parent,
        "role": message.role,
        "parts": parts,
        "reasoning": (message.reasoning or "")[:MAX_CHARS],
        "tool_calls": [
            {"name": c.name, "arguments": c.arguments[:MAX_CHARS]} for c in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "num_tokens": len(node.token_ids),
        "num_sampled": node.num_sampled,
        "num_visual": sum(slot.length for slot in node.slots),
        "finish_reason": node.finish_reason,
        "versions": [[span.version, span.start, span.stop] for span in node.versions],
        "credit": credit,
        "trained": score is not None,
        "advantage": None if score is None else float(score.advantages.mean()),
        "kl": None if score is None else float(score.kl(node).mean()),
    }


def _describe_image(run: RunView, part: ImagePart, slot: Slot | None) -> dict[str, Any]:
    ref = part.ref
    description: dict[str, Any] = {
        "image": ref.digest,
        **{name: getattr(ref, name) for name in ("mime", "width", "height", "nbytes")},
        "missing": not run.store.has(ref.digest),
    }
    if slot is not None and slot.item.ref.digest == ref.digest:
        description["slot"] = {
            "offset": slot.offset,
            "length": slot.length,
            "grid": list(slot.item.grid),
            "cover": find_image_cover(run, slot),
            "family": slot.item.family,
            "fingerprint": slot.item.fingerprint,
            "pixel_digest": slot.pixel_digest,
        }
    return description


def _describe_video(run: RunView, part: VideoPart, steps: list[Slot]) -> dict[str, Any]:
    first = part.refs[0]
    return {
        "video": "" if part.ref is None else part.ref.digest,
        "mime": first.mime,
        "width": first.width,
        "height": first.height,
        "num_frames": first.num_frames or len(part.frames),
        "fps": first.fps,
        "frames": [{"image": frame.ref.digest, "seconds": frame.seconds} for frame in part.frames],
        "num_steps": len(steps),
        "num_tokens": sum(slot.length for slot in steps),
        "missing": not all(run.store.has(ref.digest) for ref in part.refs),
    }


def find_image_cover(run: RunView, slot: Slot) -> tuple[float, float]:
    """Return the fractions of the patches' width and height that the image covers, not padding."""
    family, ref = run.family, slot.item.ref
    patch = None if family is None else family.settings.get("patch")
    if family is None or not isinstance(patch, int) or family.name != slot.item.family:
        return (1.0, 1.0)
    layout = family.layout(ref.width, ref.height)
    _, rows, columns = slot.item.grid
    return (min(1.0, layout.width / (columns * patch)), min(1.0, layout.height / (rows * patch)))


def read_node_scores(run: RunView, step: int | None, trace: Trace) -> dict[int, NodeScores]:
    """Return scores by node. Empty if the step has not trained or the scores do not align."""
    if step is None:
        return {}
    try:
        scores = StepScores.from_bytes(read_bytes(run.run_dir.scores_of(step)))
    except (OSError, msgspec.MsgspecError, SightlineError):
        return {}
    node_scores = {}
    for origin in scores.origins:
        if origin.trace_id == trace.id and origin.node < len(trace.nodes):
            span = slice(origin.start, origin.stop)
            cut = trace.nodes[origin.node].num_sampled - (origin.stop - origin.start)
            if cut >= 0:
                arrays = (scores.logprobs, scores.ratios, scores.advantages)
                # NaN stands for the last tokens, which the trainer cut off.
                padded = [
                    np.pad(array.numpy()[span], (0, cut), constant_values=np.nan)
                    for array in arrays
                ]
                node_scores[origin.node] = NodeScores(*padded)
    return node_scores


def describe_tokens(
    run: RunView, file: str, number: int, node_id: int, start: int
) -> dict[str, Any] | None:
    """Return the tokens of a node starting at `start`, with their scores and image slots."""
    match = find_trace(run, file, number)
    if match is None or not 0 <= node_id < len(match[1].nodes):
        return None
    row, trace = match
    node = trace.nodes[node_id]
    stop = min(len(node.token_ids), start + MAX_TOKENS)
    ids = node.token_ids.numpy()[start:stop].tolist()
    score = read_node_scores(run, row["step"], trace).get(node_id)
    first = node.sampled_start
    sampled = slice(max(0, start - first), max(0, stop - first))
    versions = [span.version for span in node.versions for _ in range(span.start, span.stop)]
    return {
        "node": node_id,
        "start": start,
        "total": len(node.token_ids),
        "sampled_start": first,
        "ids": ids,
        "texts": _decode_tokens(run, node, ids, start),
        "slots": [[slot.offset, slot.length, slot.item.ref.digest] for slot in node.slots],
        "logprobs": node.logprobs.numpy()[sampled].tolist(),
        "versions": versions[sampled],
        "trainer": None if score is None else score.logprobs[sampled].tolist(),
        "ratios": None if score is None else score.ratios[sampled].tolist(),
        "advantages": None if score is None else score.advantages[sampled].tolist(),
    }


def _decode_tokens(run: RunView, node: Node, ids: list[int], start: int) -> list[str | None]:
    """Return the text of each token; None for image tokens, and without a tokenizer."""
    if run.tokenizer is None:
        return [None] * len(ids)
    visual = {at for slot in node.slots for at in range(slot.offset, slot.offset + slot.length)}
    return [
        None if start + i in visual else run.tokenizer.decode([token])
        for i, token in enumerate(ids)
    ]
