"""The paths of a trace: what follows from its nodes, kept in step with them and never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sightline.message import Message
from sightline.render.protocol import Rendered
from sightline.trace.node import ROOT, Node, int32_array
from sightline.wire import Slot

MAX_CACHED_PATHS = 4
"""Enough for a conversation and a few sub-agents beside it; past that a tip is joined again."""


@dataclass(frozen=True, slots=True)
class PathTokens:
    """The whole path to a turn as lists, so that the next turn only appends to them."""

    prompt_ids: list[int]
    completion_ids: list[int]
    slots: list[Slot]
    """Absolute."""
    pixel_digests: list[str | None]
    """One per slot."""


class PathMatch(NamedTuple):
    """How far a rendered conversation agrees with the trace."""

    node: int
    num_messages: int
    num_tokens: int


class TraceGraph:
    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._children: dict[int, list[int]] = {}
        self._ends: list[int] = []
        self._cached_paths: dict[int, PathTokens] = {}
        self.num_turns = 0
        for node in nodes:
            self._index(node)

    def _index(self, node: Node) -> None:
        self._children.setdefault(node.parent, []).append(node.id)
        self._ends.append(self.end(node.parent) + len(node.token_ids))
        self.num_turns += node.is_turn

    def add(self, node: Node) -> None:
        self._nodes.append(node)
        self._index(node)

    def end(self, node: int) -> int:
        """The number of tokens from the root to the end of the node."""
        return 0 if node == ROOT else self._ends[node]

    def children(self, node: int) -> Sequence[int]:
        return self._children.get(node, ())

    def path(self, node: int) -> list[int]:
        """The ids from the root to the node."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self._nodes[node].parent
        path.reverse()
        return path

    def last_turn(self, node: int) -> int:
        """The nearest node at or above `node` that was sampled."""
        while node != ROOT and not self._nodes[node].is_turn:
            node = self._nodes[node].parent
        return node

    def match_rendered(self, history: Sequence[Message], rendered: Rendered) -> PathMatch:
        """Follows `rendered` from the root while messages, tokens and slots are the same."""
        stream = int32_array(rendered.token_ids).data
        node, offset, num_slots = ROOT, 0, 0
        for i, (message, span) in enumerate(zip(history, rendered.spans, strict=False)):
            best = None
            for child in (self._nodes[c] for c in self.children(node)):
                data, stop = child.token_ids.data, offset + len(child.token_ids)
                if (
                    stop <= span.stop
                    and child.message == message
                    and stream[4 * offset : 4 * stop] == data
                    and _has_same_slots(child, offset, rendered.slots, num_slots)
                    # A turn that was cut off is a prefix of the same turn told to its end.
                    and (best is None or len(data) >= len(best.token_ids.data))
                ):
                    best = child
            if best is None:
                return PathMatch(node, i, offset)
            node, offset = best.id, offset + len(best.token_ids)
            num_slots += len(best.slots)
        return PathMatch(node, min(len(history), len(rendered.spans)), offset)

    def find_child(
        self, parent: int, message: Message, data: bytes, slots: Sequence[Slot]
    ) -> Node | None:
        """The child of `parent` that already says this message with these tokens."""
        for child in (self._nodes[c] for c in self.children(parent)):
            if (
                child.token_ids.data == data
                and child.message == message
                and [s.item for s in child.slots] == [s.item for s in slots]
            ):
                return child
        return None

    def tokens(self, path: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for node in path:
            ids += self._nodes[node].token_ids.numpy().tolist()
        return ids

    def slots(self, path: Sequence[int]) -> list[Slot]:
        slots, start = [], 0
        for node in (self._nodes[n] for n in path):
            slots += [Slot(start + s.offset, s.length, s.item) for s in node.slots]
            start += len(node.token_ids)
        return slots

    def pixel_digests(self, path: Sequence[int]) -> list[str | None]:
        return [slot.pixel_digest for node in path for slot in self._nodes[node].slots]

    def path_tokens(self, turn: int) -> PathTokens:
        kept = self._cached_paths.get(turn)
        if kept is not None:
            return kept
        path, num_sampled = self.path(turn), self._nodes[turn].num_sampled
        ids = self.tokens(path)
        return PathTokens(
            prompt_ids=ids[:-num_sampled],
            completion_ids=ids[-num_sampled:],
            slots=self.slots(path),
            pixel_digests=self.pixel_digests(path),
        )

    def cache_path_tokens(self, turn: int, path_tokens: PathTokens, replaces: int) -> None:
        """Keeps the lists of a new turn; those of the turn that it goes on from are let go."""
        self._cached_paths.pop(replaces, None)
        self._cached_paths[turn] = path_tokens
        if len(self._cached_paths) > MAX_CACHED_PATHS:
            self._cached_paths.pop(next(iter(self._cached_paths)))


def _has_same_slots(node: Node, start: int, slots: Sequence[Slot], first: int) -> bool:
    """Whether the slots of `node`, placed at `start`, are those of `slots` from `first` on."""
    after = first + len(node.slots)
    if after < len(slots) and slots[after].offset < start + len(node.token_ids):
        return False
    return [(s.offset, s.length, s.item) for s in slots[first:after]] == [
        (start + s.offset, s.length, s.item) for s in node.slots
    ]
