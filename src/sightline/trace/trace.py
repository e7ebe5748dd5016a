"""A rollout as a graph of message nodes.

    prepare (a whole history) --.                     .-- bridge: only new tokens
                                 >-- find the path --<                            >-- Turn -- commit
    extend (new messages) ------'                     '-- render whole, fork where
                                                          tokens first differ

Compaction, sub-agents, windows and edited history are all forks. Only `Turn.commit` adds nodes.
"""

from __future__ import annotations

import msgspec

from sightline.errors import MessageError, Misaligned
from sightline.message import Message
from sightline.render import Refused, Renderer
from sightline.render.protocol import Messages, Tools
from sightline.trace.graph import TraceGraph
from sightline.trace.history_match import match_history
from sightline.trace.node import NO_TOOLS, ROOT, Node
from sightline.trace.turn import BranchPoint, Turn

TRACE_SCHEMA = 1
TOOLS_CHANGED = "tools_changed"
"""The turn has different tools than the turn it continues."""


class Trace(TraceGraph, kw_only=True, forbid_unknown_fields=True):
    """The record of one rollout: its nodes, reward and outcome."""

    group_id: str = ""
    env: str = ""
    task: int = 0
    """The index of the task in its environment and split."""
    split: str = "train"
    seed: int = 0
    reward: float | None = None
    rewards: dict[str, float] = {}
    """The named components of the reward."""
    per_turn: list[float] | None = None
    """The reward of each committed turn, in order. None if the environment has no turn rewards."""
    temperature: float = 1.0
    truncated: bool = False
    """Whether a limit ended the rollout, instead of its environment."""
    limit: str = ""
    """A description of the limit."""
    error: str = ""
    """Why the rollout failed. Empty if it did not fail."""
    error_kind: str = ""
    """A stable name for the failure: an error class, or the type in a server's response."""
    refused_requests: list[str] = msgspec.field(default_factory=list, name="door_errors")
    """The refused requests of the rollout's agent."""
    started: float = 0.0
    """The start time, in seconds since 1970."""
    ended: float = 0.0
    """The end time, in seconds since 1970."""
    schema: int = TRACE_SCHEMA

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()

    def __repr__(self) -> str:
        reward = "no reward" if self.reward is None else f"reward {self.reward:.3f}"
        ended = f", broken: {self.error_kind}" if self.error else ", truncated" * self.truncated
        return (
            f"<trace {self.id}: {self.env} task {self.task}, {self.num_turns} turns, "
            f"{self.num_tokens} tokens, {reward}{ended}>"
        )

    def check(self) -> None:
        """Raise Misaligned if nodes or rewards are inconsistent."""
        num_turns = 0
        for i, node in enumerate(self.nodes):
            if node.id != i or not ROOT <= node.parent < i:
                raise Misaligned(
                    f"trace {self.id}: node {node.id} has parent {node.parent} and place {i}",
                    "nodes are numbered by their place and follow their parents",
                )
            if not NO_TOOLS <= node.tools < len(self.toolsets):
                raise Misaligned(
                    f"trace {self.id}: node {i} names toolset {node.tools} of {len(self.toolsets)}",
                    "commit turns with Turn.commit",
                )
            num_turns += node.is_turn
        if self.per_turn is not None and len(self.per_turn) != num_turns:
            raise Misaligned(
                f"trace {self.id} has {len(self.per_turn)} per_turn credits for {num_turns} turns",
                "give one credit a turn, in the order in which they were committed",
            )

    def prepare(self, messages: Messages, renderer: Renderer, tools: Tools | None = None) -> Turn:
        """Prepare the turn after a whole history. The trace may already contain a prefix of it."""
        read = renderer.read_conversation(messages)
        node, history = match_history(self, read)
        last = self.last_turn(node)
        new = history[len(self.path(last)) :]
        return self._prepare_turn(last, history, new, renderer, tools)

    def extend(
        self, leaf: int, new_messages: Messages, renderer: Renderer, tools: Tools | None = None
    ) -> Turn:
        """Prepare the turn after `new_messages`, which follow node `leaf` (-1 for the root).

        Only the new messages are rendered.
        """
        if not ROOT <= leaf < len(self.nodes):
            raise Misaligned(
                f"trace {self.id} has no node {leaf}", "pass the id of a committed node, or -1"
            )
        new = renderer.read_messages(new_messages)
        last = self.last_turn(leaf)
        if last != leaf:
            new = [self.nodes[n].message for n in self.path(leaf) if n > last] + new
        return self._prepare_turn(last, None, new, renderer, tools)

    def _prepare_turn(
        self,
        last: int,
        history: list[Message] | None,
        new: list[Message],
        renderer: Renderer,
        tools: Tools | None,
    ) -> Turn:
        """Prepare the turn with messages `new` after turn `last`. `history` is both, if known."""
        toolset = _encode_tools(tools) if tools else ""
        refused = ""
        if last != ROOT:
            turn = self._bridge_turn(last, new, renderer, tools, toolset)
            if isinstance(turn, Turn):
                return turn
            refused = turn.reason
        if history is None:
            history = [self.nodes[n].message for n in self.path(last)] + new
        rendered = renderer.render(history, tools)
        parent, num_old, start = self.match_rendered(history, rendered)
        known = self.pixel_digests(self.path(parent))
        branch_point = BranchPoint(parent, start, known, last, refused)
        new, spans = history[num_old:], rendered.spans[num_old:]
        prompt_ids, slots = rendered.token_ids, rendered.slots
        return Turn(self, renderer, branch_point, prompt_ids, slots, new, spans, toolset)

    def _bridge_turn(
        self, last: int, new: list[Message], renderer: Renderer, tools: Tools | None, toolset: str
    ) -> Turn | Refused:
        if toolset != self.get_toolset(self.nodes[last].tools):
            return Refused(TOOLS_CHANGED)
        path_tokens = self.path_tokens(last)
        bridged = renderer.bridge(path_tokens.prompt_ids, path_tokens.completion_ids, new, tools)
        if isinstance(bridged, Refused):
            return bridged
        branch_point = BranchPoint(last, self.end(last), path_tokens.pixel_digests, last)
        prompt_ids = [*path_tokens.prompt_ids, *path_tokens.completion_ids, *bridged.token_ids]
        slots = [*path_tokens.slots, *bridged.slots]
        return Turn(self, renderer, branch_point, prompt_ids, slots, new, bridged.spans, toolset)

    @property
    def turns(self) -> list[Node]:
        """The sampled nodes, in commit order."""
        return [node for node in self.nodes if node.is_turn]

    @property
    def num_images_shown(self) -> int:
        """The number of image slots. A node shared by several turns counts once."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def num_sampled(self) -> int:
        return sum(node.num_sampled for node in self.nodes)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all nodes. Each node counts once."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def policies(self) -> set[tuple[int, int]]:
        """The version and epoch of every policy that sampled a token."""
        return {(span.version, span.epoch) for node in self.nodes for span in node.versions}

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled a token. None if nothing was sampled."""
        return min((version for version, _ in self.policies), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((version for version, _ in self.policies), default=None)


def _encode_tools(tools: Tools) -> str:
    try:
        return msgspec.json.encode(tools).decode()
    except (TypeError, UnicodeEncodeError) as error:
        raise MessageError.at("tools", f"this is not JSON: {error}", "pass plain dicts") from None
