"""Windows are pure functions. A conversation sends the model what they keep."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from sightline.envs import Conversation, last_images, last_turns
from sightline.envs.conversation import IMAGE_PLACEHOLDER
from sightline.errors import ConfigError, EnvironmentFailed
from sightline.families import load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import Message, ToolCall, assistant, system, text, user
from sightline.rollout.chat import RolloutChat
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace, flatten
from sightline.wire.control import RolloutRequest
from tests.logged_chat import LoggingPolicy, talking
from tests.unit.trace.toy import picture

CALL = msgspec.structs.replace(assistant(""), tool_calls=(ToolCall("look", "{}", "1"),))
RESULT = Message(role="tool", content=text("seen"), tool_call_id="1")


def shown(messages: list[Message]) -> list[MediaRef]:
    return [ref for message in messages for ref in message.images]


def steps(count: int) -> list[Message]:
    """A task, then `count` answers with an observation before each, the last one unanswered."""
    history = [system("s"), user("task")]
    for i in range(count):
        history += [assistant(f"a{i}"), user(f"o{i} ", picture(i))]
    return history


def test_older_images_are_replaced_by_text() -> None:
    history = [user("x", picture(1), picture(2), "y"), assistant("a"), user(picture(3))]
    windowed = last_images(2)(history)
    assert shown(windowed) == [picture(2), picture(3)]
    assert windowed[0] == user(f"x{IMAGE_PLACEHOLDER}", picture(2), "y")
    assert windowed[1] is history[1] and windowed[2] is history[2]
    assert last_images(3)(history) == history
    assert last_images(0, instead="")(history) == [user("xy"), assistant("a"), user()]


def test_older_turns_are_dropped_and_the_task_is_kept() -> None:
    history = steps(4)
    assert last_turns(2)(history) == [*history[:2], *history[-3:]]
    assert last_turns(2, keep_task=False)(history) == [history[0], *history[-3:]]
    assert last_turns(1)(history) == [*history[:2], history[-1]]
    assert last_turns(9)(history) == history
    assert last_turns(1)(history[:2]) == history[:2]
    lengths = [len(last_turns(3, step=2)(steps(n))) for n in range(7)]
    assert lengths == [2, 4, 6, 5, 7, 5, 7]


def test_tool_result_keeps_its_call() -> None:
    history = [user("task"), CALL, RESULT, RESULT, CALL, RESULT]
    assert last_turns(1)(history) == [user("task"), CALL, RESULT]
    assert last_turns(2)(history) == [user("task"), CALL, RESULT, RESULT, CALL, RESULT]


@pytest.mark.parametrize("window", [lambda: last_images(-1), lambda: last_turns(0)])
def test_empty_window_is_refused(window: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="use 0 or more|use 1 or more"):
        window()


Script = Callable[[RolloutChat], Awaitable[None]]


@pytest.fixture
def play(tiny_model: Path, store: MediaStore) -> Callable[[Script], LoggingPolicy]:
    """Run a script against a policy with a few words, and return the policy's log."""
    renderer = load_renderer(tiny_model, store)
    words = renderer.render([user("well, an answer")]).token_ids[3:12]
    policy = LoggingPolicy([[*words[:n], renderer.stop_token_ids[0]] for n in range(2, 9)])

    def run(script: Script) -> LoggingPolicy:
        async def main() -> None:
            async with talking(policy, renderer, store) as chat:
                await script(chat)

        asyncio.run(main())
        return policy

    return run


def observation(chat: RolloutChat, number: int) -> Message:
    return user(f"page {number} ", chat.put(Image.new("RGB", (32, 32), (number, 0, 0))))


def test_a_windowed_conversation_shows_the_window_and_keeps_the_rest(play) -> None:
    async def script(chat: RolloutChat) -> None:
        talk = Conversation(chat, last_images(4, step=3))
        for number in range(9):
            await talk.send([observation(chat, number)])
        assert len(shown(talk.history)) == 9 and len(talk.history) == 18
        # Images leave at the fifth and the eighth turn. The turns between are bridged.
        assert chat.trace.forks == {"diverged": 2}
        assert len(flatten(chat.trace, lambda node: 1.0)) == 3
        assert talk.calls == list(range(9)) and chat.calls == []

    policy = play(script)
    assert [len(line.slots) for line in policy.log] == [1, 2, 3, 4, 2, 3, 4, 2, 3]


def test_compacted_conversation_continues_from_its_summary(play) -> None:
    async def script(chat: RolloutChat) -> None:
        talk = Conversation(chat)
        await talk.send([system("be brief"), observation(chat, 0)])
        before = await talk.send([observation(chat, 1)])
        summary = await talk.compact("Sum it up.")
        assert talk.history == [system("be brief"), observation(chat, 0), talk.history[-1]]
        assert talk.history[-1].text.endswith(summary) and summary
        await talk.send([observation(chat, 2)])
        trace = chat.trace
        assert len(trace.turns) == 4 and talk.calls == [0, 1, 3]
        turns, summed, after = trace.turns[1:]
        # The summary follows the old history. The later turns share its opening.
        assert trace.nodes[summed.parent].message == user("Sum it up.")
        assert trace.nodes[trace.nodes[summed.parent].parent] is turns
        assert turns.message == before.as_message()
        assert trace.path(after.id)[:2] == trace.path(turns.id)[:2]
        assert [trace.nodes[n].message for n in trace.path(after.id)] == talk.history
        assert len(flatten(trace, lambda node: 1.0)) == 2

    play(script)


def test_concurrent_sub_agents_give_the_same_result_in_any_order(play) -> None:
    answers: list[list[list[str]]] = []

    async def ask(talk: Conversation, name: str, wait: asyncio.Event, go: asyncio.Event) -> None:
        await wait.wait()
        await talk.send([user(f"you are {name}")])
        await talk.send([user("go on")])
        go.set()

    def script_with(order: tuple[int, ...]) -> Script:
        async def script(chat: RolloutChat) -> None:
            talk = Conversation(chat)
            await talk.send([user("task")])
            agents = [talk.branch() for _ in range(3)]
            agents.append(talk.branch([system("you are new here")]))
            gates = [asyncio.Event() for _ in range(5)]
            gates[0].set()
            await asyncio.gather(
                *(ask(agents[n], str(n), gates[i], gates[i + 1]) for i, n in enumerate(order))
            )
            await talk.send([user("and?")])
            assert len(talk.history) == 4
            calls = sorted(call for talker in (talk, *agents) for call in talker.calls)
            assert calls == list(range(len(chat.trace.turns)))
            for talker in (talk, *agents):
                for call in talker.calls:
                    message = chat.trace.turns[call].message
                    assert message in talker.history
            answers.append([[m.text for m in talker.history] for talker in (talk, *agents)])
            assert len(flatten(chat.trace, lambda node: 1.0)) == len(chat.trace.branches()) == 5

        return script

    play(script_with((0, 1, 2, 3)))
    play(script_with((3, 1, 0, 2)))
    assert answers[0] == answers[1]


def test_retry_and_edit_fork_and_every_turn_trains_once(play) -> None:
    async def script(chat: RolloutChat) -> None:
        talk = Conversation(chat)
        await talk.send([user("one")])
        first = talk.history[-1]
        again = await talk.retry()
        assert talk.history == [user("one"), again.as_message()]
        assert chat.trace.forks == {"resampled": 1}
        talk.history[0] = user("two")
        await talk.send([user("three")])
        assert [m.text for m in talk.history[::2]] == ["two", "three"]
        assert {node.message for node in chat.trace.turns} >= {first, again.as_message()}
        trained = [s.node for s in (flatten(chat.trace, lambda n: 1.0)) for s in s.segments]
        assert sorted(trained) == [node.id for node in chat.trace.turns]
        talk.history.clear()
        with pytest.raises(EnvironmentFailed, match="before any answer"):
            await talk.retry()

    policy = play(script)
    assert len(policy.log) == 3


def test_documented_window_example_runs(tiny_model: Path, store: MediaStore) -> None:
    page = (Path(__file__).parents[3] / "docs" / "conversations.md").read_text()
    (source,) = re.findall(r"```python\n((?:(?!```).)*class Explorer.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(source, names)
    env = names["Explorer"]()
    env.draw = lambda number: Image.new("RGB", (640, 480), (number, 90, 0))
    renderer = load_renderer(tiny_model, store)
    words = renderer.render([user("yes " * 9)]).token_ids[3:30]
    policy = LoggingPolicy([[*words, renderer.stop_token_ids[0]]])

    async def main() -> Trace:
        async with talking(policy, renderer, store) as chat:
            chats = PolicyChats(
                renderer=renderer, store=store, client=chat.client, modality="image", max_tokens=64
            )
            player = RolloutPlayer(env, chats, timeout_s=60)
            played = await player.play(RolloutRequest("r", "g", 3, "train", 1, 1.0))
            await player.close()
            return played.trace

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    assert trace.per_turn is not None and len(trace.per_turn) == len(trace.turns) == len(policy.log)
    assert trace.forks["diverged"] >= 2 and max(len(line.slots) for line in policy.log) == 3
    trained = [s.node for sample in flatten(trace, lambda n: 1.0) for s in sample.segments]
    assert sorted(trained) == [node.id for node in trace.turns]
    assert any("Summary of what happened so far" in node.message.text for node in trace.nodes)
