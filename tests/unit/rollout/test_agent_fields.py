"""Request fields of agents: what a rollout honours, it honours exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import LOOK, Says, Worker, agent, calls, listening, spelled
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from scripted_policy import ScriptedPolicy

from sightline.envs import Chat
from sightline.families import load_renderer, registry
from sightline.media import MediaStore
from sightline.message import Message, assistant, text
from sightline.render import Renderer
from sightline.rollout.stop_strings import find_stop, read_answer
from sightline.trace import Trace
from sightline.wire.generate import GenerateRequest, GenerateResponse, VersionSpan

DOCS = Path(__file__).parents[3] / "docs"
GO: dict[str, Any] = {"role": "user", "content": "go"}


class SaysInTwoVersions(Says):
    """The weights change after the second token of each answer."""

    def answer(self, request: GenerateRequest, digests: list[str]) -> GenerateResponse:
        response = super().answer(request, digests)
        (choice,) = response.choices
        versions = [VersionSpan("0", 0, 2), VersionSpan("1", 2, len(choice.token_ids))]
        choice = msgspec.structs.replace(choice, weight_versions=versions)
        return msgspec.structs.replace(response, choices=[choice])


def play(
    model: Path, store: MediaStore, rollout: Any, says: Sequence[Message] = (), kind: Any = Says
) -> Trace:
    async def main() -> Trace:
        renderer = load_renderer(model, store)
        policy = kind([spelled(renderer, m) for m in says]) if says else ScriptedPolicy()
        async with listening(policy.app()) as address:
            worker = Worker(model, store, address, max_tokens=2000 if says else 6)
            return await worker.play(rollout)

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    return trace


# --- stop strings

STOPS = ["never said", "\nObservation:"]
REACTS = assistant("Look left.\nObservation: a tree, which only the environment can know.")


@pytest.fixture
def renderer(tiny_model: Path, store: MediaStore) -> Renderer:
    return load_renderer(tiny_model, store)


def test_stop_string_keeps_the_sampled_tokens_and_cuts_the_text(
    tiny_model: Path, store: MediaStore, renderer: Renderer
) -> None:
    async def rollout(chat: Chat) -> float:
        history: list[Any] = [GO]
        async with agent(chat) as client:
            for said in ("Look left.", "Done."):
                answer = await client.chat.completions.create(
                    model="m", messages=history, stop=STOPS
                )
                (choice,) = answer.choices
                assert choice.finish_reason == "stop" and choice.message.content == said
                history.append(choice.message.model_dump(exclude_none=True))
                history.append({"role": "user", "content": "Observation: a wall"})
        return 1.0

    trace = play(tiny_model, store, rollout, [REACTS, assistant("Done.")], SaysInTwoVersions)
    assert trace.forks == {} and not trace.refused_requests
    first, second = trace.turns
    sampled = first.token_ids.numpy()[first.sampled_start :].tolist()
    assert sampled == spelled(renderer, REACTS)[: len(sampled)], "a prefix of what was sampled"
    assert renderer.decode(sampled).endswith(STOPS[1])
    assert not renderer.decode(sampled[:-1]).endswith(STOPS[1])
    assert len(first.logprobs) == len(sampled) == first.versions[-1].stop
    assert [span.version for span in first.versions] == [0, 1]
    path = trace.path(second.id)
    assert first.id in path, "the next prompt continues the sampled tokens"
    start = trace.end(first.id) - len(sampled)
    assert trace.tokens(path)[start : start + len(sampled)] == sampled


def test_stop_inside_the_first_version_drops_the_second(
    tiny_model: Path, store: MediaStore
) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            answer = await client.chat.completions.create(model="m", messages=[GO], stop="L")
            assert answer.choices[0].message.content == ""
            assert answer.usage.completion_tokens == 1
        return 1.0

    trace = play(tiny_model, store, rollout, [REACTS], SaysInTwoVersions)
    assert [(span.version, span.stop) for span in trace.turns[0].versions] == [(0, 1)]


@pytest.mark.parametrize("family", ["qwen_vl", "glm_v", "kimi_k25", "llama3"])
def test_stop_string_is_found_where_sampling_would_have_ended(
    tmp_path: Path, store: MediaStore, family: str
) -> None:
    registry.write_tiny(family, tmp_path / "model", seed=0)
    renderer = load_renderer(tmp_path / "model", store)
    ids = spelled(renderer, REACTS)
    stops = ["tree", "Observation"]
    grown = next(k for k in range(len(ids)) if "Observation" in renderer.decode(ids[:k]))
    assert find_stop(ids, stops, renderer.decode) == grown < len(ids)
    message, end = read_answer(renderer, ids, None, stops)
    assert (message.text, end, message.stopped) == ("Look left.\n", grown, True)
    assert read_answer(renderer, ids, None, ["never said"]) == (renderer.parse(ids), None)


# --- choices and tools


def test_choices_are_samples_of_one_prompt(tiny_model: Path, store: MediaStore) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            answer = await client.chat.completions.create(model="m", messages=[GO], n=3)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert answer.usage.completion_tokens == 18
            said = answer.choices[1].message.model_dump(exclude_none=True)
            await client.chat.completions.create(model="m", messages=[GO, said, GO])
        return 1.0

    trace = play(tiny_model, store, rollout)
    *choices, last = trace.turns
    assert len({node.parent for node in choices}) == 1 and len(choices) == 3
    assert choices[1].id in trace.path(last.id)
    assert trace.forks == {"resampled": 2}


def test_tool_choice_none_renders_no_tools(tiny_model: Path, store: MediaStore) -> None:
    async def ask(chat: Chat, **more: Any) -> float:
        async with agent(chat) as client:
            await client.chat.completions.create(model="m", messages=[GO], **more)
        return 1.0

    without = play(tiny_model, store, lambda chat: ask(chat))
    hidden = play(tiny_model, store, lambda chat: ask(chat, tools=[LOOK], tool_choice="none"))
    offered = play(tiny_model, store, lambda chat: ask(chat, tools=[LOOK], tool_choice="auto"))
    assert hidden.nodes == without.nodes
    assert offered.num_tokens > hidden.num_tokens


def test_arguments_have_the_types_that_the_tools_declare(tmp_path: Path, store: MediaStore) -> None:
    """Some formats write no types, so that a text of digits looks like a number."""
    registry.write_tiny("qwen_vl", tmp_path / "model", seed=0, type="qwen3_5")
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {**LOOK["function"], "parameters": parameters}}

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            answer = await client.chat.completions.create(model="m", messages=[GO], tools=[tool])
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"x": "3"}
        reply = await chat.send([Message("tool", text("a tree"))], tools=[tool])
        assert json.loads(reply.tool_calls[0].arguments) == {"x": "4"}
        return 1.0

    play(tmp_path / "model", store, rollout, [calls('{"x": "3"}'), calls('{"x": "4"}')])


# --- the table of fields


def list_params(module: Any, kind: str) -> set[str]:
    bases = (f"{kind}CreateParamsBase", f"{kind}CreateParamsStreaming")
    return {name for base in bases for name in getattr(module, base).__annotations__}


@pytest.mark.parametrize(
    ("names", "heading"),
    [
        (list_params(chat_params, "Completion"), "## Chat completions"),
        (list_params(response_params, "Response"), "## Responses"),
    ],
)
def test_every_field_of_the_sdk_is_in_the_table(names: set[str], heading: str) -> None:
    section = (DOCS / "agent_endpoint.md").read_text().partition(heading)[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for name in names if not any(f"`{name}`" in cell for cell in cells)} == set()
