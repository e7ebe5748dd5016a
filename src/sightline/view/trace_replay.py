"""A saved trace held against a renderer and a server: is it still what they would make and say?

    each turn      rendered again ---> token ids and slots, against those of its path
                   parsed again -----> the message, against the node's
    each branch    scored again -----> logprobs of its sampled tokens and pixel digests

A sampled token is scored once, in the longest branch that holds it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sightline.errors import EngineError
from sightline.render import Bridged, Renderer, Tools
from sightline.trace.node import ROOT, Node
from sightline.trace.trace import Trace
from sightline.wire import Slot

LOGPROB_TOLERANCE = 1e-3
"""By how much a logprob may differ; a float32 engine agrees with itself to about 1e-5."""
BRIDGED, RENDERED, NEITHER = "bridged", "rendered", "neither"
NUM_CONTEXT_TOKENS = 4
"""Tokens that are spelled out on either side of a difference."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a server says about a prompt."""

    logprobs: Sequence[float | None]
    """The logprob of each token; None for those that have none."""
    pixel_digests: Sequence[str | None]
    """The digest of the pixels of each slot."""
    version: str
    """The version of the weights that scored."""


class PromptScorer(Protocol):
    """Asks a server to score a prompt."""

    async def __call__(
        self, token_ids: list[int], slots: list[Slot], temperature: float
    ) -> PromptScores: ...


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """One way in which a turn is not what would be made or said now."""

    node: int
    what: str
    """What differs: ids, slots, message, pixels, logprobs or refused."""
    detail: str


@dataclass(slots=True)
class TurnReplay:
    """How one turn was made, and how far its logprobs moved."""

    node: int
    prompt_origin: str
    """Which way of making the prompt gives the recorded one: bridged, rendered or neither."""
    num_sampled: int
    max_logprob_change: float | None = None
    """The largest absolute change of a sampled token; None when nothing was scored."""


@dataclass(slots=True)
class ReplayReport:
    """What a trace showed when it was replayed."""

    trace_id: str
    turns: list[TurnReplay] = field(default_factory=list)
    differences: list[ReplayDifference] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    """The versions of the weights that scored."""
    num_digests: int = 0
    """Pixel digests that were compared; those that nobody recorded cannot be."""

    @property
    def max_logprob_change(self) -> float | None:
        changes = [t.max_logprob_change for t in self.turns if t.max_logprob_change is not None]
        return max(changes, default=None)


async def replay_trace(
    trace: Trace,
    renderer: Renderer,
    score: PromptScorer | None,
    tolerance: float = LOGPROB_TOLERANCE,
) -> ReplayReport:
    """Renders, parses and scores all turns of `trace` again; without `score` nothing is scored."""
    replayed = ReplayReport(trace.id)
    for node in trace.turns:
        prompt_origin, differences = await asyncio.to_thread(_replay_turn, trace, node, renderer)
        replayed.turns.append(TurnReplay(node.id, prompt_origin, node.num_sampled))
        replayed.differences += differences
    if score is not None:
        scoring = _ScoreComparison(trace, replayed, tolerance)
        for path, turns in trace.split_turns({turn.id for turn in trace.turns}):
            await scoring.score(path, turns, score)
    replayed.differences.sort(key=lambda difference: difference.node)
    return replayed


# --- rendered again


def _replay_turn(
    trace: Trace, node: Node, renderer: Renderer
) -> tuple[str, list[ReplayDifference]]:
    path = trace.path(node.id)
    recorded = trace.tokens(path)[: -node.num_sampled]
    slots = trace.slots(path)
    prompt_origin, made, made_slots = _rebuild_prompt(trace, node, renderer, recorded, slots)
    found = []
    if made != recorded:
        found.append(ReplayDifference(node.id, "ids", _describe_ids(recorded, made, renderer)))
    if made_slots != slots:
        found.append(ReplayDifference(node.id, "slots", _describe_slots(slots, made_slots)))
    completion = trace.tokens([node.id])[node.sampled_start :]
    parsed = renderer.parse(completion, _get_tools(trace, node)).as_message()
    if parsed != node.message:
        found.append(
            ReplayDifference(
                node.id, "message", f"recorded {node.message!r}, now parsed as {parsed!r}"
            )
        )
    return prompt_origin, found


def _get_tools(trace: Trace, node: Node) -> Tools | None:
    toolset = trace.get_toolset(node.tools)
    tools: Tools | None = json.loads(toolset) if toolset else None
    return tools


def _rebuild_prompt(
    trace: Trace, node: Node, renderer: Renderer, recorded: list[int], slots: list[Slot]
) -> tuple[str, list[int], list[Slot]]:
    """The prompt of a turn, made as it was; where neither way gives it, as it would be made now."""
    tools = _get_tools(trace, node)
    before = trace.path(node.parent) if node.parent != ROOT else []
    last = trace.last_turn(node.parent)
    bridged = None
    if last != ROOT and trace.nodes[last].tools == node.tools:
        path_tokens = trace.path_tokens(last)
        new = [trace.nodes[n].message for n in before if n > last]
        answer = (
            renderer.bridge(path_tokens.prompt_ids, path_tokens.completion_ids, new, tools)
            if new
            else None
        )
        if isinstance(answer, Bridged):
            bridged = (
                [*path_tokens.prompt_ids, *path_tokens.completion_ids, *answer.token_ids],
                [*path_tokens.slots, *answer.slots],
            )
            if bridged == (recorded, slots):
                return BRIDGED, *bridged
    full = renderer.render([trace.nodes[n].message for n in before], tools)
    rendered = (full.token_ids, full.slots)
    if rendered == (recorded, slots):
        return RENDERED, *rendered
    return NEITHER, *(bridged or rendered)


def _describe_ids(recorded: list[int], made: list[int], renderer: Renderer) -> str:
    at = first_difference(recorded, made)
    then, now = (describe_tokens(ids, at, renderer) for ids in (recorded, made))
    return (
        f"token {at} of {len(recorded)} recorded, {len(made)} made now: recorded {then}, now {now}"
    )


def _describe_slots(recorded: list[Slot], made: list[Slot]) -> str:
    at = first_difference(recorded, made)
    return f"slot {at}: recorded {describe_slot(recorded, at)}, now {describe_slot(made, at)}"


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """The first place at which the two differ; the length of the shorter when it begins both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def describe_tokens(token_ids: Sequence[int], at: int, renderer: Renderer | None) -> str:
    """The ids around `at`, and their text where a renderer can tell it."""
    if at >= len(token_ids):
        return f"the end, after {len(token_ids)} tokens"
    part = list(token_ids[max(at - NUM_CONTEXT_TOKENS, 0) : at + NUM_CONTEXT_TOKENS + 1])
    text = f" {renderer.decode(part)!r}" if renderer is not None else ""
    return f"{token_ids[at]} in {part}{text}"


def describe_slot(slots: Sequence[Slot], at: int) -> str:
    if at >= len(slots):
        return f"none after {len(slots)}"
    slot = slots[at]
    return (
        f"{slot.offset}+{slot.length} {slot.item.name} grid {slot.item.grid} "
        f"fingerprint {slot.item.fingerprint[:12]}"
    )


# --- scored again


class _ScoreComparison:
    def __init__(self, trace: Trace, replayed: ReplayReport, tolerance: float) -> None:
        self._trace = trace
        self._replayed = replayed
        self._tolerance = tolerance
        self._turns = {turn.node: turn for turn in replayed.turns}

    async def score(self, path: list[int], turns: list[int], score: PromptScorer) -> None:
        trace, replayed = self._trace, self._replayed
        try:
            scored = await score(trace.tokens(path), trace.slots(path), trace.temperature)
        except EngineError as error:
            if error.status >= 500:
                raise  # the server fails, which says nothing about the trace
            detail = f"{error.kind}: {error.problem}"
            replayed.differences += [ReplayDifference(node, "refused", detail) for node in turns]
            return
        replayed.versions.add(scored.version)
        self._compare_digests(path, scored)
        for node in turns:
            self._compare_logprobs(trace.nodes[node], scored)

    def _compare_digests(self, path: list[int], scored: PromptScores) -> None:
        pairs = [(node, slot) for node in path for slot in self._trace.nodes[node].slots]
        for (node, slot), seen in zip(pairs, scored.pixel_digests, strict=True):
            if slot.pixel_digest is None or seen is None:
                continue
            self._replayed.num_digests += 1
            found = ReplayDifference(
                node,
                "pixels",
                f"{slot.item.name}: recorded {slot.pixel_digest}, now {seen}",
            )
            if seen != slot.pixel_digest and found not in self._replayed.differences:
                self._replayed.differences.append(found)

    def _compare_logprobs(self, node: Node, scored: PromptScores) -> None:
        stop = self._trace.end(node.id)
        now = scored.logprobs[stop - node.num_sampled : stop]
        worst, place = 0.0, -1
        for i, (then, value) in enumerate(zip(node.logprobs.numpy().tolist(), now, strict=True)):
            change = abs(then - value) if value is not None else float("inf")
            if change > worst:
                worst, place = change, i
        self._turns[node.id].max_logprob_change = worst
        if worst > self._tolerance:
            then = float(node.logprobs.numpy()[place])
            self._replayed.differences.append(
                ReplayDifference(
                    node.id,
                    "logprobs",
                    f"sampled token {place}: recorded {then:.6f}, now {now[place]}; "
                    f"more than {self._tolerance:g} apart",
                )
            )
