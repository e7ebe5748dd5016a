"""`/v1/responses` of a rollout, asked by the official SDK: the same tokens as chat completions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from agents import LOOK, Says, Worker, agent, calls, listening, picture_url, spelled
from openai.types import responses
from scripted_policy import ScriptedPolicy

from sightline.envs import Chat
from sightline.families import load_renderer, registry
from sightline.media import MediaStore
from sightline.message import Message, assistant
from sightline.trace import Trace

SAYS = [
    calls('{"x": 1}', '{"x": 2}', content="Hm.", reasoning="I think."),
    calls('{"x": 3}', reasoning="Again."),
    assistant("Done."),
]
TOOL: Any = {"type": "function", **LOOK["function"]}
BRIEF = "Be brief."


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers have reasoning and calls."""
    model = tmp_path_factory.mktemp("reasoner") / "model"
    registry.write_tiny("qwen_vl", model, seed=0, type="qwen3_5")
    return model


def play(model: Path, store: MediaStore, rollout: Any, says: list[Message] | None = None) -> Trace:
    async def main() -> Trace:
        renderer = load_renderer(model, store)
        policy = Says([spelled(renderer, m) for m in says]) if says else ScriptedPolicy()
        async with listening(policy.app()) as address:
            return await Worker(model, store, address, max_tokens=2000).play(rollout)

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    return trace


def tokens(trace: Trace) -> list[list[int]]:
    return [trace.tokens(path) for path in trace.branches()]


def image(turn: int) -> dict[str, Any]:
    return {"type": "input_image", "image_url": picture_url(turn), "detail": "auto"}


async def chat_completions(chat: Chat) -> float:
    history: list[Any] = [{"role": "system", "content": BRIEF}, {"role": "user", "content": "go"}]
    async with agent(chat) as client:
        for turn in range(3):
            answer = await client.chat.completions.create(model="m", messages=history, tools=[LOOK])
            message = answer.choices[0].message.model_dump(exclude_none=True)
            history.append(message)
            for call in message.get("tool_calls", ()):
                part = {"type": "image_url", "image_url": {"url": picture_url(turn)}}
                history.append({"role": "tool", "tool_call_id": call["id"], "content": [part]})
    return 1.0


def check_output(response: Any, said: Message) -> None:
    """Every item is one that the SDK parses, and together they are the sampled message."""
    kinds = [item.type for item in response.output]
    assert kinds == (
        ["reasoning"] * (said.reasoning is not None)
        + ["message"] * bool(said.text)
        + ["function_call"] * len(said.tool_calls)
    )
    responses.Response.model_validate(response.model_dump())
    assert response.status == "completed" and response.output_text == said.text
    found = [item.arguments for item in response.output if item.type == "function_call"]
    assert found == [call.arguments for call in said.tool_calls]
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def outputs(response: Any, turn: int) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": [image(turn)]}
        for item in response.output
        if item.type == "function_call"
    ]


async def with_whole_input(chat: Chat) -> float:
    items: list[Any] = [{"role": "user", "content": "go"}]
    async with agent(chat) as client:
        for turn in range(3):
            response = await client.responses.create(
                model="m", instructions=BRIEF, input=items, tools=[TOOL]
            )
            check_output(response, SAYS[turn])
            items += [item.model_dump(exclude_none=True) for item in response.output]
            items += outputs(response, turn)
    return 1.0


async def with_previous_id(chat: Chat) -> float:
    items: Any = "go"
    previous: Any = openai.omit
    async with agent(chat) as client:
        for turn in range(3):
            response = await client.responses.create(
                model="m",
                instructions=BRIEF,
                input=items,
                tools=[TOOL],
                previous_response_id=previous,
            )
            previous, items = response.id, outputs(response, turn)
    return 1.0


async def streamed(chat: Chat) -> float:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    async with agent(chat) as client:
        for turn in range(3):
            async with client.responses.stream(
                model="m", instructions=BRIEF, input=items, tools=[TOOL]
            ) as stream:
                events = [event async for event in stream]
                response = await stream.get_final_response()
            check_output(response, SAYS[turn])
            numbers = [event.sequence_number for event in events]
            assert numbers == sorted(numbers) and events[0].type == "response.created"
            text = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(text) == SAYS[turn].text
            items += json.loads(response.model_dump_json(exclude_none=True))["output"]
            items += outputs(response, turn)
    return 1.0


@pytest.mark.parametrize("rollout", [with_whole_input, with_previous_id, streamed])
def test_responses_and_chat_completions_have_the_same_tokens(
    reasoner: Path, store: MediaStore, rollout: Any
) -> None:
    expected = play(reasoner, store, chat_completions, SAYS)
    trace = play(reasoner, store, rollout, SAYS)
    assert tokens(trace) == tokens(expected) and len(trace.turns) == 3
    assert trace.forks == expected.forks == {} and trace.num_images_shown == 3


def user_parts(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": user_parts({"type": "input_file"})}, "input[0].content[0].type"),
    ({"input": user_parts({"type": "input_image"})}, "input[0].content[0].image_url"),
    ({"input": [*user_parts(), {"type": "item_reference", "id": "x"}]}, "input[1].type"),
    ({"input": [*user_parts(), {"type": "web_search_call", "id": "x"}]}, "input[1].type"),
    ({"previous_response_id": "resp_other-1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"top_p": 0.5}, "top_p"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
    ({"stop": ["x"]}, "stop"),
    ({"unheard_of": 1}, "unheard_of"),
]  # fmt: skip


def test_response_request_is_refused_with_its_own_path(tiny_model: Path, store: MediaStore) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            for change, param in REFUSED:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(model="m", extra_body={"input": "Hi", **change})
                assert caught.value.param == param, change
                assert "fix: " in caught.value.body["message"]
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert len(trace.refused_requests) == len(REFUSED) and not trace.nodes


def test_harmless_fields_of_a_response_request_are_accepted(
    tiny_model: Path, store: MediaStore
) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            response = await client.responses.create(
                model="gpt-x",
                input="Hi",
                max_output_tokens=3,
                temperature=0.2,
                top_p=1,
                tool_choice="none",
                tools=[TOOL],
                parallel_tool_calls=False,
                store=False,
                include=["reasoning.encrypted_content"],
                reasoning={"effort": "low", "summary": "auto"},
                text={"format": {"type": "text"}, "verbosity": "low"},
                truncation="disabled",
                metadata={"a": "b"},
                user="me",
                service_tier="auto",
                safety_identifier="s",
                prompt_cache_key="k",
                max_tool_calls=4,
                background=False,
            )
            assert response.usage.output_tokens == 3 and response.model == "gpt-x"
            assert response.metadata == {"a": "b"} and response.tools[0].name == "look"
            follow = await client.responses.create(
                model="m", input="And?", previous_response_id=response.id, max_output_tokens=2
            )
            assert follow.previous_response_id == response.id
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert len(trace.turns) == 2 and trace.forks == {} and not trace.refused_requests
