"""Whatever a conversation does, its trace holds exactly what the engine saw and said.

Random agents extend, ask whole histories, edit them, ask again, ask side by side, are cut off
and give up. A scripted engine keeps its own log of every call, and the trace is held against it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import num_examples

from sightline.media import MediaRef, MediaStore
from sightline.message import Message, assistant, system, user
from sightline.render import Renderer
from sightline.trace import Node, PolicySpan, Trace, Turn, decode_trace, encode_trace, flatten
from sightline.trace.node import ROOT
from sightline.wire import Slot
from tests.unit.trace.toy import END, LETTER, TOOL, ToyRenderer, digests, picture


@dataclass
class World:
    """A chat format, and what may be said and shown in it."""

    renderer: Renderer
    words: list[int]
    """Ids that a policy may sample, beside the stop token."""
    pictures: list[MediaRef]


@dataclass
class Call:
    """A line of the engine's log."""

    prompt_ids: list[int]
    slots: list[Slot]
    completion: list[int]
    node: int
    history: list[Message]


class Agent:
    """Drives one trace at random, with an engine that answers at random."""

    def __init__(self, world: World, data: st.DataObject) -> None:
        self.world = world
        self.draw = data.draw
        self.trace = Trace(id="t", reward=1.0)
        self.calls: list[Call] = []

    def play(self) -> None:
        acts = [self.extend, self.extend, self.ask, self.edit, self.side_by_side, self.give_up]
        for _ in range(self.draw(st.integers(1, 8))):
            self.draw(st.sampled_from(acts))()

    def extend(self) -> None:
        leaf = self.leaf()
        new = self.new_messages(first=leaf == ROOT)
        history = self.history(leaf) + new
        self.answer(self.trace.extend(leaf, new, self.world.renderer, self.tools()), history)

    def ask(self) -> None:
        leaf = self.leaf()
        history = self.history(leaf)
        if leaf == ROOT or self.draw(st.booleans()):
            history += self.new_messages(first=not history)
        self.answer(self.trace.prepare(history, self.world.renderer, self.tools()), history)

    def edit(self) -> None:
        """A history of which a message was replaced or left out."""
        history = self.history(self.leaf())
        if not history:
            return self.ask()
        place = self.draw(st.integers(0, len(history) - 1))
        old = history[place].role
        if old == "system":
            new = [system(self.text())] * self.draw(st.integers(0, 1))
        elif old == "assistant":
            new = [assistant(self.text())] * self.draw(st.integers(0, 1))
        else:
            new = [self.observation()] * self.draw(st.integers(0, 1))
        history[place : place + 1] = new
        history += self.new_messages(first=not history)
        self.answer(self.trace.prepare(history, self.world.renderer, self.tools()), history)

    def side_by_side(self) -> None:
        """Several requests on their way at once, some of them the same."""
        leaf, tools = self.leaf(), self.tools()
        one, two = self.new_messages(leaf == ROOT), self.new_messages(leaf == ROOT)
        asked = [self.draw(st.sampled_from([one, two])) for _ in range(3)]
        turns = [self.trace.extend(leaf, new, self.world.renderer, tools) for new in asked]
        for new, turn in self.draw(st.permutations(list(zip(asked, turns, strict=True)))):
            self.answer(turn, self.history(leaf) + new)

    def give_up(self) -> None:
        before = encode_trace(self.trace)
        leaf = self.leaf()
        self.trace.extend(leaf, self.new_messages(leaf == ROOT), self.world.renderer, self.tools())
        assert encode_trace(self.trace) == before

    def answer(self, turn: Turn, history: list[Message]) -> None:
        ids = self.draw(st.lists(st.sampled_from(self.world.words), min_size=1, max_size=5))
        stop = self.draw(st.booleans())
        ids += [self.world.renderer.stop_token_ids[0]] * stop
        cut = self.draw(st.integers(1, len(ids)))
        versions = [PolicySpan(0, cut, version=len(self.calls), epoch=0)]
        if cut < len(ids):
            versions.append(PolicySpan(cut, len(ids), version=len(self.calls) + 1, epoch=1))
        logprobs = [-1.0 - len(self.calls) - i / 8 for i in range(len(ids))]
        call = Call(list(turn.prompt_ids), list(turn.slots), ids, -1, history)
        node = turn.commit(
            ids, logprobs, versions, "stop" if stop else "length", digests(turn.slots)
        )
        call.node = node.id
        self.calls.append(call)

    def leaf(self) -> int:
        return self.draw(st.sampled_from([ROOT, *(call.node for call in self.calls)]))

    def history(self, leaf: int) -> list[Message]:
        return [self.trace.nodes[node].message for node in self.trace.path(leaf)]

    def new_messages(self, first: bool) -> list[Message]:
        opening = [system(self.text())] if first and self.draw(st.booleans()) else []
        return opening + [self.observation() for _ in range(self.draw(st.integers(1, 2)))]

    def observation(self) -> Message:
        shown = self.draw(st.lists(st.sampled_from(self.world.pictures), max_size=2))
        return user(self.text(), *shown)

    def text(self) -> str:
        return self.draw(st.sampled_from(["a", "ab", "?", "b a"]))

    def tools(self) -> list[dict] | None:
        return TOOL if self.draw(st.integers(0, 9)) == 0 else None


def check(agent: Agent) -> None:
    trace = agent.trace
    check_calls(agent)
    check_samples(trace, agent.calls)
    back = decode_trace(encode_trace(trace))
    assert back == trace
    assert flatten(back, lambda node: 1.0) == flatten(trace, lambda node: 1.0)


def check_calls(agent: Agent) -> None:
    """For each call the trace holds what the engine's log says, and what the agent asked."""
    trace = agent.trace
    assert sorted(call.node for call in agent.calls) == [node.id for node in trace.turns]
    for call in agent.calls:
        path = trace.path(call.node)
        node = trace.nodes[call.node]
        assert trace.tokens(path) == call.prompt_ids + call.completion
        assert trace.slots(path) == call.slots
        assert [trace.nodes[n].message for n in path[:-1]] == call.history
        assert node.num_sampled == len(call.completion)
        recorded = [slot.pixel_digest for n in path for slot in trace.nodes[n].slots]
        assert recorded == digests(call.slots)
        for n in path:
            # The images of a node are those that its message brought.
            shown = trace.nodes[n]
            assert tuple(slot.item.ref for slot in shown.slots) == shown.message.images
    # What is shared is stored once: no two prompt nodes say the same behind the same parent.
    said = [(n.parent, n.message, n.token_ids) for n in trace.nodes if not n.is_turn]
    assert len(set(said)) == len(said)


def check_samples(trace: Trace, calls: list[Call]) -> None:
    """Each sampled token trains once, in a sample that reads as the engine did."""
    by_node = {call.node: call for call in calls}
    trained: Counter[int] = Counter()
    samples = flatten(trace, lambda node: float(node.id))
    for sample in samples:
        ids, indices = sample.token_ids.numpy().tolist(), sample.trained.numpy().tolist()
        assert indices == [i for s in sample.segments for i in range(s.start, s.stop)]
        assert indices == sorted(set(indices)) and indices[0] > 0
        logprobs, versions = list[float](), list[int]()
        for segment in sample.segments:
            call, node = by_node[segment.node], trace.nodes[segment.node]
            trained[segment.node] += 1
            assert ids[: segment.stop] == call.prompt_ids + call.completion
            assert ids[segment.start : segment.stop] == call.completion
            slots = [s for s in sample.slots if s.offset < segment.start]
            assert [Slot(s.offset, s.length, sample.items[s.item]) for s in slots] == call.slots
            assert [s.pixel_digest for s in slots] == digests(call.slots)
            logprobs += node.logprobs.numpy().tolist()
            for span in node.versions:
                versions += [span.version] * (span.stop - span.start)
        assert sample.logprobs.numpy().tolist() == logprobs
        assert sample.versions.numpy().tolist() == versions
        assert len({item.key for item in sample.items}) == len(sample.items)
        assert {slot.item for slot in sample.slots} == set(range(len(sample.items)))
    assert trained == Counter(by_node.keys())
    assert len(samples) <= len(trace.branches())


TOY = World(ToyRenderer(), [LETTER + ord(c) for c in "ab "], [picture(i) for i in range(4)])


@settings(max_examples=num_examples(120, 50), deadline=None)
@given(st.data())
def test_the_trace_of_a_random_agent_is_what_the_engine_saw(data: st.DataObject) -> None:
    agent = Agent(TOY, data)
    agent.play()
    check(agent)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_extending_and_asking_the_same_gives_the_same_trace(data: st.DataObject) -> None:
    sent, asked = Trace(id="t"), Trace(id="t")
    leaf, history = ROOT, list[Message]()
    agent = Agent(TOY, data)
    for i in range(data.draw(st.integers(1, 4))):
        new = agent.new_messages(first=not history)
        if any(message.text.startswith("?") for message in new) and i:
            continue
        history += new
        turns = (sent.extend(leaf, new, TOY.renderer), asked.prepare(history, TOY.renderer))
        assert turns[0].prompt_ids == turns[1].prompt_ids
        assert turns[0].new_tokens == turns[1].new_tokens
        leaf, _ = (fixed_answer(turn).id for turn in turns)
        history.append(sent.nodes[leaf].message)
    assert sent == asked
    assert sent.forks == {}


def fixed_answer(turn: Turn) -> Node:
    ids = [LETTER + ord("a"), LETTER + ord("b"), END]
    span = PolicySpan(0, len(ids), version=0, epoch=0)
    return turn.commit(ids, [-1.0] * len(ids), [span], "stop", digests(turn.slots))


@pytest.fixture(scope="module")
def real_world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The Qwen-VL chat format with the tokenizer of its tiny checkpoint."""
    from PIL import Image

    from sightline.families import load_renderer

    store = MediaStore(tmp_path_factory.mktemp("media"))
    pictures = [store.put(Image.new("RGB", size)) for size in ((64, 64), (64, 96), (128, 64))]
    renderer = load_renderer(tiny_model, store)
    words = renderer.render([user("the abc of it, a b?")]).token_ids
    special = {*words[:3], *renderer.stop_token_ids, *renderer.pad_token_ids}
    return World(renderer, sorted(set(words) - special), pictures)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_the_same_holds_for_a_real_chat_format(real_world: World, data: st.DataObject) -> None:
    agent = Agent(real_world, data)
    agent.play()
    check(agent)
