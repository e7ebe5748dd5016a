"""The trace of a rollout equals the server's log, whatever an agent does.

Random agents extend, send and edit whole histories, use windows, compact, retry, call tools, show
images and start concurrent sub-agents. They use the real chat over HTTP, with a policy that logs
each request. Every chat format is tested.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from shards import num_examples

from sightline.envs import Conversation, last_images, last_turns
from sightline.envs.conversation import Window
from sightline.families import load_family, load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import Message, ToolCall, assistant, system, text, user
from sightline.render import Renderer
from sightline.rollout.chat import RolloutChat
from sightline.trace import Trace, decode_trace, encode_trace, flatten
from tests.contract.case import Case
from tests.contract.cases import read_cases
from tests.logged_chat import Line, LoggingPolicy, line_of, talking

LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
# Shrinking would play hundreds of rollouts, and the scripts are already short.
# These agents send two messages in a row, which templates with strict turns refuse.
CASES = [case for case in read_cases() if case.has_own_format and not case.alternates]
FEW = settings(
    max_examples=num_examples(20, 8),
    phases=set(Phase) - {Phase.shrink},
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class World:
    """A chat format, the content that it supports, and the answers of its policy."""

    case: Case
    renderer: Renderer
    store: MediaStore
    modality: str
    pictures: list[MediaRef]
    sayings: list[list[int]]

    @property
    def call(self) -> list[int]:
        """The saying that calls a tool, where the format has any."""
        return self.sayings[-2]


def ends_calls_otherwise(world: World) -> bool:
    """Return whether a tool call ends with another token than a text.

    The end then depends on the next message. If another kind follows, the turn is rendered again.
    """
    return world.sayings[0][-1] != world.call[-1]


def make_world(case: Case, folder: Path) -> World:
    case.write(folder / "model")
    store = MediaStore(folder / "media")
    renderer = load_renderer(folder / "model", store)
    sizes = ((64, 64), (64, 96), (32, 32)) if case.shows_media else ()
    pictures = [store.put(Image.new("RGB", size)) for size in sizes]
    answers = [assistant("yes"), assistant("the a b"), assistant("")]
    if case.takes_reasoning and not case.closes_reasoning:
        answers += [assistant("so", reasoning="hm"), assistant("", reasoning="the")]
    if case.takes_tools:
        calls = (ToolCall("look", '{"x": 1}', "functions.look:0"),)
        answers += [msgspec.structs.replace(answers[0], tool_calls=calls)]
    sayings = [in_full(renderer, message) for message in answers]
    family = load_family(folder / "model")
    return World(case, renderer, store, family.modality, pictures, [*sayings, sayings[0][:-1]])


def in_full(renderer: Renderer, message: Message) -> list[int]:
    """Return the tokens that the assistant samples for a message, including its stop token."""
    rendered = renderer.render([user("?"), message], generation_prompt=False)
    span = rendered.trained[0]
    return rendered.token_ids[span.start : span.stop]


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def made(case: Case) -> World:
        return make_world(case, tmp_path_factory.mktemp(case.name))

    return made


# --- acts of agents


class Act(msgspec.Struct, frozen=True):
    kind: str
    who: int
    """Select one of the conversations, modulo their number."""
    words: str
    pictures: tuple[int, ...]
    tools: bool
    place: int
    count: int


KINDS = (
    "send", "send", "send", "ask", "edit", "retry", "compact", "side_agent", "parallel",
    "new_agent",
)  # fmt: skip
ACTS = st.builds(
    Act,
    kind=st.sampled_from(KINDS),
    who=st.integers(0, 7),
    words=st.sampled_from(["a", "the b?", "  ", "it is\n\nso", "<think>"]),
    pictures=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    tools=st.sampled_from([False] * 5 + [True]),
    place=st.integers(0, 9),
    count=st.integers(1, 3),
)
WINDOWS = st.sampled_from(
    [
        (),
        (last_images(1),),
        (last_images(2, step=2),),
        (last_turns(1),),
        (last_turns(2, step=2), last_images(1, instead="")),
    ]
)


class Agent:
    """Follows a script of acts, and checks every model call against the request."""

    def __init__(self, world: World, chat: RolloutChat, windows: tuple[Window, ...]) -> None:
        self.world = world
        self.chat = chat
        self.talks = [Conversation(chat, *windows)]
        self.windows = {id(self.talks[0]): windows}
        self.asked: dict[int, list[Message]] = {}
        """The messages that each call was to answer, by the number of the call."""

    async def play(self, acts: list[Act]) -> None:
        await self.send(self.talks[0], Act("send", 0, "begin", (0,), False, 0, 1))
        for act in acts:
            await getattr(self, act.kind)(self.talks[act.who % len(self.talks)], act)

    async def send(self, talk: Conversation, act: Act) -> None:
        new = self.observation(talk, act)
        view = [*talk.history, *new]
        for window in self.windows[id(talk)]:
            view = window(view)
        await talk.send(new, tools=self.tools(act))
        self.expect(talk.calls[-1], view)

    async def ask(self, talk: Conversation, act: Act) -> None:
        """Return the plain chat, with the beginning of another history."""
        history = talk.history
        ends = [i + 1 for i, message in enumerate(history) if message.role in ("user", "tool")]
        upto = history[: ends[act.place % len(ends)]]
        await self.chat.ask(upto, tools=self.tools(act))
        self.expect(self.chat.calls[-1], upto)

    async def edit(self, talk: Conversation, act: Act) -> None:
        place = act.place % len(talk.history)
        old = talk.history[place]
        if old.role == "assistant" and not old.tool_calls:
            talk.history[place] = assistant(act.words)
        elif old.role == "user":
            talk.history[place] = user(act.words)
        elif old.role == "system":
            talk.history[place] = system(act.words)
        await self.send(talk, act)

    async def retry(self, talk: Conversation, act: Act) -> None:
        view = talk.history[:-1]
        for window in self.windows[id(talk)]:
            view = window(view)
        await talk.retry(tools=self.tools(act))
        self.expect(talk.calls[-1], view)

    async def compact(self, talk: Conversation, act: Act) -> None:
        await talk.compact(act.words)
        await self.send(talk, act)

    async def side_agent(self, talk: Conversation, act: Act) -> None:
        """Run a branch that returns. Its parent continues with the result."""
        side = self.fork(talk)
        await self.send(side, act)
        await talk.send([user(f"found {side.history[-1].text}")])

    async def parallel(self, talk: Conversation, act: Act) -> None:
        sides = [self.fork(talk) for _ in range(act.count)]
        sides += [talk] if act.place % 2 else []
        await asyncio.gather(*(self.send(side, act) for side in sides))
        self.talks += sides[:1]

    async def new_agent(self, talk: Conversation, act: Act) -> None:
        side = self.fork(talk, [system("another"), user("begin")])
        await self.send(side, act)
        self.talks.append(side)

    def fork(self, talk: Conversation, history: list[Message] | None = None) -> Conversation:
        side = talk.branch(history)
        self.windows[id(side)] = self.windows[id(talk)]
        return side

    def observation(self, talk: Conversation, act: Act) -> list[Message]:
        pictures = self.world.pictures
        images = [pictures[n % len(pictures)] for n in act.pictures if pictures]
        last = talk.history[-1] if talk.history else None
        if last is not None and last.tool_calls and self.world.case.takes_tools:
            content = user(act.words, *images).content
            return [
                Message(role="tool", content=content or text("-"), tool_call_id=call.id)
                for call in last.tool_calls
            ]
        return [user(act.words, *images)]

    def tools(self, act: Act) -> list[dict] | None:
        return LOOK if act.tools and self.world.case.takes_tools else None

    def expect(self, call: int, asked: list[Message]) -> None:
        assert call not in self.asked
        self.asked[call] = asked


# --- invariants


def check_log(trace: Trace, log: list[Line]) -> None:
    """Check that ids, slots, digests and logprobs of each call equal the server's log."""
    assert sorted(line_of(node) for node in trace.turns) == list(range(len(log)))
    for node in trace.turns:
        line, path = log[line_of(node)], trace.path(node.id)
        tokens, num_prompt = trace.tokens(path), len(line.prompt_ids)
        assert tokens[:num_prompt] == line.prompt_ids
        assert tokens[num_prompt:] == line.completion and node.num_sampled == len(line.completion)
        slots = trace.slots(path)
        assert [(s.offset, s.length, s.item.ref.digest) for s in slots] == line.places()
        assert slots == line.slots
        assert trace.pixel_digests(path) == line.pixel_digests
        assert node.logprobs.numpy().tolist() == line.logprobs
    assert len({line.seed for line in log}) == len(log)


def check_shared(trace: Trace) -> None:
    """Prompt nodes are stored once. Images are references, each with its own message."""
    shared_nodes = [(n.parent, n.message, n.token_ids) for n in trace.nodes if not n.is_turn]
    assert len(set(shared_nodes)) == len(shared_nodes)
    for node in trace.nodes:
        assert tuple(slot.item.ref for slot in node.slots) == node.message.images


def check_trained(trace: Trace, log: list[Line]) -> None:
    """Check that every sampled token trains once over all samples, after its own prompt."""
    trained: Counter[tuple[int, int]] = Counter()
    for sample in flatten(trace, lambda node: 1.0):
        ids = sample.token_ids.numpy().tolist()
        for segment in sample.segments:
            line = log[line_of(trace.nodes[segment.node])]
            assert ids[: segment.stop] == line.prompt_ids + line.completion
            before = [s for s in sample.slots if s.offset < segment.start]
            assert [
                (s.offset, s.length, sample.items[s.item].ref.digest) for s in before
            ] == line.places()
            trained.update((segment.node, i) for i in range(segment.stop - segment.start))
    sampled = [(node.id, i) for node in trace.turns for i in range(node.num_sampled)]
    assert trained == Counter(sampled)


def check_asked(agent: Agent) -> None:
    """Check that the path to a turn equals the agent's request, and that calls are numbered."""
    trace = agent.chat.trace
    for call, requests in agent.asked.items():
        path = trace.path(trace.turns[call].id)
        assert [trace.nodes[n].message for n in path[:-1]] == requests


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_agents_trace_matches_the_server_log(case: Case, world_of) -> None:
    world = world_of(case)

    @FEW
    @given(acts=st.lists(ACTS, max_size=8), windows=WINDOWS)
    def play(acts: list[Act], windows: tuple[Window, ...]) -> None:
        policy = LoggingPolicy(world.sayings)

        async def main() -> Agent:
            async with talking(policy, world.renderer, world.store, world.modality) as chat:
                agent = Agent(world, chat, windows)
                await agent.play(acts)
                return agent

        agent = asyncio.run(main())
        trace = agent.chat.trace
        check_log(trace, policy.log)
        check_shared(trace)
        check_trained(trace, policy.log)
        check_asked(agent)
        assert decode_trace(encode_trace(trace)) == trace

    play()


def test_one_script_covers_every_turn_preparation_path(world_of) -> None:
    """Check that the random cases cover all kinds."""
    cases = [case for case in read_cases() if case.takes_tools and not case.name.startswith("any")]
    worlds = map(world_of, cases)
    world = next(world for world in worlds if not ends_calls_otherwise(world))
    policy = LoggingPolicy(world.sayings)
    acts = [
        Act(kind, 0, f"{kind} ", (n % 3,), n % 7 == 1, n, 2) for n, kind in enumerate(KINDS * 2)
    ]

    async def main() -> Trace:
        async with talking(policy, world.renderer, world.store) as chat:
            await Agent(world, chat, (last_images(2),)).play(acts)
            return chat.trace

    trace = asyncio.run(main())
    check_log(trace, policy.log)
    check_trained(trace, policy.log)
    assert {"diverged", "resampled", "tools_changed", "assistant_among_new"} <= trace.forks.keys()
    prompts = [line.prompt_ids for line in policy.log]
    whole = [line.prompt_ids + line.completion for line in policy.log]
    bridged = [p for p in prompts if any(p[: len(w)] == w for w in whole)]
    assert 5 < len(bridged) < len(prompts) - 5
    assert len(trace.branches()) > 5
