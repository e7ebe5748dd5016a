"""Replay a saved trace: render, parse and score it again, and compare the results.

    each turn      rendered again ---> token ids and slots, compared with its path
                   parsed again -----> message, compared with the node's
    each branch    scored again -----> logprobs of its sampled tokens, and pixel digests

Each sampled token is scored once, in the longest branch that contains it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from sightline.errors import EngineError
from sightline.render import Bridged, Renderer, Tools
from sightline.rollout.scoring import PromptScores, ServerPromptScorer
from sightline.trace.node import ROOT, Node
from sightline.trace.trace import Trace
from sightline.wire import Slot

LOGPROB_TOLERANCE = 1e-3
"""Maximum difference of a logprob. A float32 engine reproduces its own to about 1e-5."""
BRIDGED, RENDERED, NEITHER = "bridged", "rendered", "neither"
NUM_CONTEXT_TOKENS = 4
"""Number of tokens shown on either side of a difference."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """One difference between a recorded turn and its replay."""

    node: int
    what: str
    """ids, slots, message, pixels, logprobs or refused."""
    detail: str


@dataclass(slots=True)
class TurnReplay:
    node: int
    prompt_origin: str
    """Method that rebuilds the recorded prompt: bridged, rendered or neither."""
    num_sampled: int
    max_logprob_change: float | None = None
    """Largest absolute logprob change of a sampled token; None if the turn was not scored."""


@dataclass(slots=True)
class ReplayReport:
    trace_id: str
    turns: list[TurnReplay] = field(default_factory=list)
    differences: list[ReplayDifference] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    """Versions of the weights that computed the scores."""
    num_digests: int = 0
    """Number of compared pixel digests. Slots without a recorded digest are skipped."""

    def add(self, node: int, what: str, detail: str) -> None:
        """Add a difference, unless it was already found in another branch."""
        if (difference := ReplayDifference(node, what, detail)) not in self.differences:
            self.differences.append(difference)

    @property
    def max_logprob_change(self) -> float | None:
        changes = [t.max_logprob_change for t in self.turns if t.max_logprob_change is not None]
        return max(changes, default=None)


async def replay_trace(
    trace: Trace,
    renderer: Renderer,
    score: ServerPromptScorer | None,
    tolerance: float = LOGPROB_TOLERANCE,
) -> ReplayReport:
    """Render and parse all turns of `trace` again, and score them if `score` is given."""
    replayed = ReplayReport(trace.id)
    for node in trace.turns:
        prompt_origin = await asyncio.to_thread(_replay_turn, trace, node, renderer, replayed)
        replayed.turns.append(TurnReplay(node.id, prompt_origin, node.num_sampled))
    if score is not None:
        for path, turns in trace.split_turns({turn.id for turn in trace.turns}):
            try:
                scored = await score(trace.tokens(path), trace.slots(path), trace.temperature)
            except EngineError as error:
                if error.status >= 500:
                    raise  # the server failed, which says nothing about the trace
                for turn in turns:
                    replayed.add(turn, "refused", f"{error.kind}: {error.problem}")
                continue
            replayed.versions.add(scored.version)
            _compare_digests(trace, path, scored, replayed)
            for turn in turns:
                _compare_logprobs(trace, trace.nodes[turn], scored, tolerance, replayed)
    replayed.differences.sort(key=lambda difference: difference.node)
    return replayed


# --- rendered again


def _replay_turn(trace: Trace, node: Node, renderer: Renderer, replayed: ReplayReport) -> str:
    """Add the differences of a turn to `replayed`, and return the origin of its prompt."""
    path = trace.path(node.id)
    recorded = trace.tokens(path)[: -node.num_sampled]
    slots = trace.slots(path)
    prompt_origin, rebuilt, rebuilt_slots = _rebuild_prompt(trace, node, renderer, recorded, slots)
    if rebuilt != recorded:
        at = first_difference(recorded, rebuilt)
        then, now = (describe_tokens(ids, at, renderer) for ids in (recorded, rebuilt))
        detail = f"token {at} of {len(recorded)} recorded and {len(rebuilt)} rebuilt: "
        replayed.add(node.id, "ids", f"{detail}recorded {then}, now {now}")
    if rebuilt_slots != slots:
        at = first_difference(slots, rebuilt_slots)
        then, now = (_describe_slot(some, at) for some in (slots, rebuilt_slots))
        replayed.add(node.id, "slots", f"slot {at}: recorded {then}, now {now}")
    completion = trace.tokens([node.id])[node.sampled_start :]
    parsed = renderer.parse(completion, _get_tools(trace, node)).as_message()
    if parsed != node.message:
        detail = f"recorded {node.message!r}, now parsed as {parsed!r}"
        replayed.add(node.id, "message", detail)
    return prompt_origin


def _get_tools(trace: Trace, node: Node) -> Tools | None:
    toolset = trace.get_toolset(node.tools)
    tools: Tools | None = json.loads(toolset) if toolset else None
    return tools


def _rebuild_prompt(
    trace: Trace, node: Node, renderer: Renderer, recorded: list[int], slots: list[Slot]
) -> tuple[str, list[int], list[Slot]]:
    """Rebuild a turn's prompt by bridging or by rendering, whichever gives the recorded tokens. If
    neither does, return what this version would send."""
    tools = _get_tools(trace, node)
    before = trace.path(node.parent) if node.parent != ROOT else []
    last = trace.last_turn(node.parent)
    bridged = None
    if last != ROOT and trace.nodes[last].tools == node.tools:
        path_tokens = trace.path_tokens(last)
        new = [trace.nodes[n].message for n in before if n > last]
        prompt_ids, completion_ids = path_tokens.prompt_ids, path_tokens.completion_ids
        answer = renderer.bridge(prompt_ids, completion_ids, new, tools) if new else None
        if isinstance(answer, Bridged):
            bridged = (
                [*prompt_ids, *completion_ids, *answer.token_ids],
                [*path_tokens.slots, *answer.slots],
            )
            if bridged == (recorded, slots):
                return BRIDGED, *bridged
    full = renderer.render([trace.nodes[n].message for n in before], tools)
    rendered = (full.token_ids, full.slots)
    if rendered == (recorded, slots):
        return RENDERED, *rendered
    return NEITHER, *(bridged or rendered)


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first index at which the sequences differ, or the shorter one's length."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def describe_tokens(token_ids: Sequence[int], at: int, renderer: Renderer) -> str:
    """Return the token ids around `at`, and their text."""
    if at >= len(token_ids):
        return f"the end, after {len(token_ids)} tokens"
    part = list(token_ids[max(at - NUM_CONTEXT_TOKENS, 0) : at + NUM_CONTEXT_TOKENS + 1])
    return f"{token_ids[at]} in {part} {renderer.decode(part)!r}"


def _describe_slot(slots: Sequence[Slot], at: int) -> str:
    if at >= len(slots):
        return f"none after {len(slots)}"
    slot = slots[at]
    return (
        f"{slot.offset}+{slot.length} {slot.item.name} grid {slot.item.grid} "
        f"fingerprint {slot.item.fingerprint[:12]}"
    )


# --- scored again


def _compare_digests(
    trace: Trace, path: list[int], scored: PromptScores, replayed: ReplayReport
) -> None:
    pairs = [(node, slot) for node in path for slot in trace.nodes[node].slots]
    for (node, slot), seen in zip(pairs, scored.pixel_digests, strict=True):
        if slot.pixel_digest is None or seen is None:
            continue
        replayed.num_digests += 1
        if seen != slot.pixel_digest:
            detail = f"{slot.item.name}: recorded {slot.pixel_digest}, now {seen}"
            replayed.add(node, "pixels", detail)


def _compare_logprobs(
    trace: Trace, node: Node, scored: PromptScores, tolerance: float, replayed: ReplayReport
) -> None:
    stop = trace.end(node.id)
    now = scored.logprobs[stop - node.num_sampled : stop]
    then = node.logprobs.numpy().tolist()
    changes = [
        float("inf") if value is None else abs(recorded - value)
        for recorded, value in zip(then, now, strict=True)
    ]
    worst = max(changes, default=0.0)
    next(turn for turn in replayed.turns if turn.node == node.id).max_logprob_change = worst
    if worst > tolerance:
        place = changes.index(worst)
        detail = f"sampled token {place}: recorded {then[place]:.6f}, now {now[place]}; "
        detail += f"the difference is above {tolerance:g}"
        replayed.add(node.id, "logprobs", detail)
