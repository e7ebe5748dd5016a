"""The graph of a trace. Only this module adds nodes, toolsets and forks.

The indexes are derived from the nodes and never stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from cachetools import LRUCache

from sightline.message import Message
from sightline.render.protocol import Rendered
from sightline.trace.node import NO_TOOLS, ROOT, Node, int32_array
from sightline.wire import Slot

MAX_CACHED_PATHS = 4
"""Enough for a conversation and a few sub-agents. Other paths are rebuilt."""


@dataclass(frozen=True, slots=True)
class PathTokens:
    """The tokens of the path to a turn, as lists to which the next turn appends."""

    prompt_ids: list[int]
    completion_ids: list[int]
    slots: list[Slot]
    """The slots, at offsets from the start of the path."""
    pixel_digests: list[str | None]
    """The recorded digest of each slot."""


class TraceGraph(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The part of a trace that grows with every turn."""

    id: str
    nodes: list[Node] = []
    toolsets: list[str] = []
    """The distinct tool lists of all turns, as JSON."""
    forks: dict[str, int] = {}
    """The number of turns that did not continue the last turn of their path, by reason."""

    def __post_init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        self._ends: list[int] = []
        self._cached_paths: LRUCache[int, PathTokens] = LRUCache(MAX_CACHED_PATHS)
        self.num_turns = 0
        for node in self.nodes:
            self._index(node)

    def _index(self, node: Node) -> None:
        self._children.setdefault(node.parent, []).append(node.id)
        self._ends.append(self.end(node.parent) + len(node.token_ids))
        self.num_turns += node.is_turn

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self._index(node)

    def add_toolset(self, tools: str) -> int:
        """Return the index of a toolset. Add it if it is new."""
        if not tools:
            return NO_TOOLS
        if tools not in self.toolsets:
            self.toolsets.append(tools)
        return self.toolsets.index(tools)

    def get_toolset(self, number: int) -> str:
        """Return a turn's tools as JSON, or an empty string if it has none."""
        return "" if number == NO_TOOLS else self.toolsets[number]

    def count_fork(self, reason: str) -> None:
        self.forks[reason] = self.forks.get(reason, 0) + 1

    def end(self, node: int) -> int:
        """Return the number of tokens from the root to the end of the node."""
        return 0 if node == ROOT else self._ends[node]

    def children(self, node: int) -> Sequence[int]:
        return self._children.get(node, ())

    def path(self, node: int) -> list[int]:
        """Return the node ids from the root to the node."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        path.reverse()
        return path

    def branches(self) -> list[list[int]]:
        """Return the node ids from the root to every leaf, ordered by leaf."""
        return [self.path(node.id) for node in self.nodes if not self.children(node.id)]

    def split_turns(self, turns: Container[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield paths with the `turns` that no earlier path contains.

        Branches are ordered by length, longest first, then by leaf id. A path ends at its last new
        turn.
        """
        assigned = set[int]()
        branches = sorted(self.branches(), key=lambda path: (-self.end(path[-1]), path[-1]))
        for path in branches:
            if new_turns := [node for node in path if node in turns and node not in assigned]:
                assigned.update(new_turns)
                yield path[: path.index(new_turns[-1]) + 1], new_turns

    def last_turn(self, node: int) -> int:
        """Return the nearest sampled node at or above `node`."""
        while node != ROOT and not self.nodes[node].is_turn:
            node = self.nodes[node].parent
        return node

    def turn_origins(self) -> list[tuple[int, int]] | None:
        """Return each turn's prompt node and the turn that it continues, as in `Sample`."""
        turns = [node for node in self.nodes if node.is_turn]
        number = {ROOT: -1} | {node.id: turn for turn, node in enumerate(turns)}
        origins = [(node.parent, number[self.last_turn(node.parent)]) for node in turns]
        is_chain = all(parent == turn - 1 for turn, (_, parent) in enumerate(origins))
        return None if is_chain else origins

    def match_rendered(
        self, history: Sequence[Message], rendered: Rendered
    ) -> tuple[int, int, int]:
        """Follow `rendered` from the root while messages, tokens and slots are equal.

        Return the last equal node, and the number of messages and tokens up to its end.
        """
        stream = int32_array(rendered.token_ids).data
        node, offset, num_slots = ROOT, 0, 0
        for i, (message, span) in enumerate(zip(history, rendered.spans, strict=False)):
            same = [
                child
                for child in (self.nodes[c] for c in self.children(node))
                if (stop := offset + len(child.token_ids)) <= span.stop
                and child.message == message
                and stream[4 * offset : 4 * stop] == child.token_ids.data
                and _has_same_slots(child, offset, rendered.slots, num_slots)
            ]
            if not same:
                return node, i, offset
            # A truncated turn is a prefix of the same turn sampled to its end.
            best = max(same, key=lambda child: (len(child.token_ids), child.id))
            node, offset = best.id, offset + len(best.token_ids)
            num_slots += len(best.slots)
        return node, min(len(history), len(rendered.spans)), offset

    def find_child(
        self, parent: int, message: Message, data: bytes, slots: Sequence[Slot]
    ) -> Node | None:
        """Return the child of `parent` with this message and these tokens."""
        expected = (data, message, [slot.item for slot in slots])
        for child in (self.nodes[c] for c in self.children(parent)):
            if (child.token_ids.data, child.message, [s.item for s in child.slots]) == expected:
                return child
        return None

    def tokens(self, path: Sequence[int]) -> list[int]:
        """Return the concatenated tokens of a path."""
        parts = (self.nodes[node].token_ids.numpy().tolist() for node in path)
        return list(itertools.chain.from_iterable(parts))

    def slots(self, path: Sequence[int]) -> list[Slot]:
        """Return the slots of a path, with offsets from its first token."""
        slots, start = [], 0
        for node in (self.nodes[n] for n in path):
            slots += [Slot(start + s.offset, s.length, s.item) for s in node.slots]
            start += len(node.token_ids)
        return slots

    def pixel_digests(self, path: Sequence[int]) -> list[str | None]:
        return [slot.pixel_digest for node in path for slot in self.nodes[node].slots]

    def path_tokens(self, turn: int) -> PathTokens:
        cached = self._cached_paths.get(turn)
        if cached is not None:
            return cached
        path, num_sampled = self.path(turn), self.nodes[turn].num_sampled
        ids = self.tokens(path)
        return PathTokens(
            prompt_ids=ids[:-num_sampled],
            completion_ids=ids[-num_sampled:],
            slots=self.slots(path),
            pixel_digests=self.pixel_digests(path),
        )

    def cache_path_tokens(self, turn: int, path_tokens: PathTokens, replaces: int) -> None:
        """Cache the lists of a new turn, and free those of the turn that it continues."""
        self._cached_paths.pop(replaces, None)
        self._cached_paths[turn] = path_tokens


def _has_same_slots(node: Node, start: int, slots: Sequence[Slot], first: int) -> bool:
    """Return whether the slots of `node`, shifted by `start`, equal `slots[first:]`."""
    after = first + len(node.slots)
    if after < len(slots) and slots[after].offset < start + len(node.token_ids):
        return False
    return [(s.offset, s.length, s.item) for s in slots[first:after]] == [
        (start + s.offset, s.length, s.item) for s in node.slots
    ]
