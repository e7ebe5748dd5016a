"""One model call: its prompt, and the commit of its answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

import numpy as np

from sightline.errors import Misaligned, PixelMismatch
from sightline.message import AssistantMessage, Message
from sightline.render import Renderer
from sightline.trace.graph import PathTokens, TraceGraph
from sightline.trace.node import Node, PolicySpan, check_policy_spans, float32_array, int32_array
from sightline.wire import Array, Slot, Span

RESAMPLED = "resampled"
"""The same prompt was sampled again."""
DIVERGED = "diverged"
"""The messages diverge from a path that already continues differently."""


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A turn's place in the trace, and the reason if it had to be rendered whole."""

    parent: int
    """The node that precedes the new nodes."""
    start: int
    """The number of prompt tokens on the path to the parent."""
    pixel_digests: list[str | None]
    """The recorded digests of the slots before `start`."""
    last_turn: int
    """The turn that the conversation continues."""
    refused: str = ""
    """Why bridging was refused. Empty if it was not refused or not tried."""


@dataclass(eq=False)
class Turn:
    """A prepared model call. It changes nothing until `commit`, so a failed request is harmless.

    Send `prompt_ids` and `slots` to the engine. Do not modify them, because the trace shares them.
    """

    _graph: TraceGraph
    _renderer: Renderer
    _branch_point: BranchPoint
    prompt_ids: list[int]
    slots: list[Slot]
    _new_messages: Sequence[Message]
    spans: InitVar[Sequence[Span]]
    """The span of each new message in the prompt."""
    _tools: str

    def __post_init__(self, spans: Sequence[Span]) -> None:
        self._stops = self._check_spans(spans)

    @property
    def new_tokens(self) -> list[int]:
        """The prompt ids that are not in the trace yet."""
        return self.prompt_ids[self._branch_point.start :]

    @property
    def routes_from(self) -> int:
        """The first token whose routes the trace lacks: the one before the first new token."""
        return max(self._branch_point.start - 1, 0)

    def commit(
        self,
        completion_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[PolicySpan],
        finish_reason: str,
        pixel_digests: Sequence[str | None] | None = None,
        message: AssistantMessage | None = None,
        routes: np.ndarray | None = None,
    ) -> Node:
        """Add the new messages and the model's answer to the trace. Return the answer's node.

        `pixel_digests` has one entry per slot of the whole prompt. It is None if the engine does
        not report digests. `message` is the parsed completion. `routes` are those of the tokens
        starting at `routes_from`, at least to the one before the last. Errors change nothing.
        """
        completion = list(completion_ids)
        take_routes = self._build_route_slices(len(completion), routes)
        self._check_completion(completion, logprobs, versions, finish_reason)
        digests = self._check_digests(pixel_digests)
        parent, new = self._build_message_nodes(digests, take_routes)
        reason = self._branch_point.refused or self._find_fork_reason(parent, resampled=not new)

        first = self._stops[-1] if self._stops else self._branch_point.start
        header = self.prompt_ids[first:]
        tools = json.loads(self._tools) if self._tools else None
        parsed = message if message is not None else self._renderer.parse(completion, tools)
        node = Node(
            id=len(self._graph.nodes) + len(new),
            parent=new[-1].id if new else parent,
            message=parsed.as_message(),
            token_ids=int32_array(header + completion),
            sampled_start=len(header),
            logprobs=float32_array(logprobs),
            versions=tuple(versions),
            routes=take_routes(first, len(self.prompt_ids) + len(completion)),
            finish_reason=finish_reason,
            tools=self._graph.add_toolset(self._tools),
        )
        for added in (*new, node):
            self._graph.add(added)
        if reason:
            self._graph.count_fork(reason)
        path_tokens = PathTokens(self.prompt_ids, completion, self.slots, digests)
        self._graph.cache_path_tokens(node.id, path_tokens, replaces=self._branch_point.last_turn)
        return node

    def _build_route_slices(
        self, num_sampled: int, routes: np.ndarray | None
    ) -> Callable[[int, int], Array | None]:
        """Return a function that returns the routes of a node with tokens [start, stop)."""
        if routes is None:
            return lambda start, stop: None
        start = self._branch_point.start
        num_expected = len(self.prompt_ids) + num_sampled - 1 - self.routes_from
        if routes.ndim != 3 or len(routes) < num_expected:
            raise Misaligned(
                f"turn of trace {self._graph.id}: {num_expected} tokens starting at "
                f"{self.routes_from} have routes of shape {routes.shape}",
                "the engine must report the experts of every token that it computed",
            )
        if start == 0:  # no token led to the first one
            unknown = np.full_like(routes[:1], np.iinfo(routes.dtype).max)
            routes = np.concatenate([unknown, routes])
        return lambda at, stop: Array.of(routes[at - start : stop - start], str(routes.dtype))

    def _build_message_nodes(
        self, digests: list[str | None], take_routes: Callable[[int, int], Array | None]
    ) -> tuple[int, list[Node]]:
        """Return the last existing node, and new nodes for the remaining messages.

        Another turn with the same prompt may have been committed since this one was prepared.
        """
        parent, new = self._branch_point.parent, list[Node]()
        start, next_slot = self._branch_point.start, len(self._branch_point.pixel_digests)
        for message, stop in zip(self._new_messages, self._stops, strict=True):
            slots = []
            while next_slot < len(self.slots) and self.slots[next_slot].offset < stop:
                slot = self.slots[next_slot]
                slots.append(Slot(slot.offset - start, slot.length, slot.item, digests[next_slot]))
                next_slot += 1
            ids, routes = int32_array(self.prompt_ids[start:stop]), take_routes(start, stop)
            start = stop
            known = None if new else self._graph.find_child(parent, message, ids.data, slots)
            if known is not None:
                for now, old in zip(slots, known.slots, strict=True):
                    self._check_digest(now.item.ref.digest, now.pixel_digest, old.pixel_digest)
                parent = known.id
                continue
            new.append(
                Node(
                    id=len(self._graph.nodes) + len(new),
                    parent=new[-1].id if new else parent,
                    message=message,
                    token_ids=ids,
                    sampled_start=len(ids),
                    routes=routes,
                    slots=tuple(slots),
                )
            )
        return parent, new

    def _find_fork_reason(self, parent: int, resampled: bool) -> str:
        """Return why the turn is a fork, or an empty string if it continues its path."""
        siblings = self._graph.children(parent)
        if resampled and any(self._graph.nodes[node].is_turn for node in siblings):
            return RESAMPLED
        return DIVERGED if siblings else ""

    def _check_spans(self, spans: Sequence[Span]) -> list[int]:
        """Return the ends of the new messages. Raise if spans do not fit the tokens and slots."""
        stops = [span.stop for span in spans]
        ends = [self._branch_point.start, *stops]
        if (
            len(stops) == len(self._new_messages)
            and ends == sorted(ends)
            and 0 < len(self.prompt_ids) >= ends[-1]
            and (not self.slots or self.slots[-1].end <= ends[-1])
        ):
            return stops
        raise Misaligned(
            f"trace {self._graph.id}: {len(self._new_messages)} new messages end at {stops} "
            f"in {len(self.prompt_ids)} tokens, of which those from {self._branch_point.start} on "
            f"are new. The last slot ends at {self.slots[-1].end if self.slots else None}",
            "this is a bug in the renderer: it must return one span per message, with the slots "
            "inside, and then the header of the assistant's turn",
        )

    def _check_completion(
        self,
        completion: list[int],
        logprobs: Sequence[float],
        versions: Sequence[PolicySpan],
        finish_reason: str,
    ) -> None:
        who = f"turn of trace {self._graph.id}"
        if not completion or len(logprobs) != len(completion) or not finish_reason:
            raise Misaligned(
                f"{who}: the answer has {len(completion)} tokens, {len(logprobs)} logprobs and the "
                f"finish reason {finish_reason!r}",
                "the engine must return tokens, a logprob for each and a finish reason; retry",
            )
        if not math.isfinite(sum(logprobs)):
            raise Misaligned(
                f"{who}: a logprob is not finite", "look for NaN in the engine's weights"
            )
        check_policy_spans(versions, len(completion), who)
        if pads := set(self._renderer.pad_token_ids).intersection(completion):
            raise Misaligned(
                f"{who}: media pads {sorted(pads)} were sampled",
                "the engine must mask the renderer's pad_token_ids out of its logits",
            )

    def _check_digests(self, given: Sequence[str | None] | None) -> list[str | None]:
        """Return one digest per slot. Slots already in the trace keep their recorded digest."""
        digests: list[str | None] = [None] * len(self.slots) if given is None else list(given)
        if len(digests) != len(self.slots):
            raise Misaligned(
                f"turn of trace {self._graph.id}: there are {len(digests)} pixel digests for "
                f"{len(self.slots)} slots",
                "the engine must return one digest per slot of the prompt, in their order",
            )
        known = self._branch_point.pixel_digests
        if digests[: len(known)] != known:
            for i, recorded in enumerate(known):
                self._check_digest(self.slots[i].item.ref.digest, digests[i], recorded)
        return known + digests[len(known) :]

    def _check_digest(self, item: str, given: str | None, recorded: str | None) -> None:
        if None not in (given, recorded) and given != recorded:
            raise PixelMismatch(
                f"trace {self._graph.id}: the engine reports pixels {given} for item {item[:12]}, "
                f"and reported {recorded} before",
                "use the same versions of sightline and Pillow, and the same processor settings, "
                "on all engines of the run",
            )
