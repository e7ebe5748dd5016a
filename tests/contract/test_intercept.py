"""Programs with the OpenAI SDK, against the tiny model on the embedded engine.

The trace contains exactly the engine's input and output.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import CountingStore, Seen, Worker, agent, picture_url, shown, wire_to
from openai import BadRequestError, OpenAI
from serving import Client, live

from sightline.envs import Chat
from sightline.families import load_renderer, registry
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import Message, ToolCall, text, user
from sightline.trace import Trace

NUM_TURNS = 16
GO = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
CALL = Message(role="assistant", tool_calls=(ToolCall("go", '{"x": 1}'),))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> CountingStore:
    return CountingStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def server(tiny_model: Path, media: CountingStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=tiny_model,
        media_roots=(media.root,),
        device="cpu",
        max_num_seqs=16,
        max_model_len=4096,
    )
    with live(settings) as client:
        yield client


@pytest.fixture
def play(tiny_model: Path, media: CountingStore, server: Client) -> Any:
    """Play a rollout, check the recorded requests, and return the trace."""

    return partial(watched, Worker(tiny_model, media, url_of(server)))


def url_of(server: Client) -> str:
    return f"http://{server.host}:{server.port}"


def watched(worker: Worker, rollout: Any, **more: Any) -> Trace:
    async def main() -> Trace:
        recorder = Seen()
        async with wire_to(worker.server, recorder) as address:
            trace = await replace(worker, server=address).play(rollout, **more)
        assert not trace.error, trace.error
        recorder.check(trace)
        return trace

    return asyncio.run(main())


async def loop(chat: Chat, num_turns: int, **more: Any) -> list[Any]:
    """A typical agent, which sends the whole history with every turn."""
    answers, history = [], []
    async with agent(chat) as client:
        for turn in range(num_turns):
            history.append(shown(turn))
            answer = await client.chat.completions.create(model="any", messages=history, **more)
            answers.append(answer)
            history.append(answer.choices[0].message.model_dump(exclude_none=True))
    return answers


def test_multi_turn_agent_is_one_path_of_the_servers_tokens(
    play: Any, media: CountingStore
) -> None:
    answers: list[Any] = []

    async def rollout(chat: Chat) -> float:
        answers.extend(await loop(chat, NUM_TURNS))
        return 1.0

    before = media.num_put
    trace = play(rollout)
    assert trace.forks == {} and not trace.refused_requests
    assert len(trace.branches()) == 1 and len(trace.turns) == NUM_TURNS == trace.num_images_shown
    # Turn k sends k images. Each is decoded, validated and hashed once.
    assert media.num_put - before == NUM_TURNS
    for node, answer in zip(trace.turns, answers, strict=True):
        assert answer.choices[0].message.content == node.message.text
        assert answer.usage.completion_tokens == node.num_sampled
        assert answer.usage.prompt_tokens == trace.end(node.id) - node.num_sampled
    # The engine cached the keys and values of every turn except its last sampled token.
    assert all(answer.usage.prompt_tokens_details.cached_tokens for answer in answers[1:])


def test_intercepted_conversation_has_the_same_tokens_as_chat(play: Any) -> None:
    async def intercepted(chat: Chat) -> float:
        await loop(chat, 4)
        return 1.0

    async def own(chat: Chat) -> float:
        for turn in range(4):
            await chat.send([shown(turn)])
        return 1.0

    one, other = play(intercepted), play(own)
    assert [n.token_ids for n in one.nodes] == [n.token_ids for n in other.nodes]
    assert [n.slots for n in one.nodes] == [n.slots for n in other.nodes]
    assert [n.logprobs for n in one.nodes] == [n.logprobs for n in other.nodes]


def test_streamed_response_equals_the_unstreamed_one(play: Any) -> None:
    pieces: list[Any] = []

    async def whole(chat: Chat) -> float:
        await loop(chat, 2)
        return 1.0

    async def streamed(chat: Chat) -> float:
        history: list[Any] = []
        async with agent(chat) as client:
            for turn in range(2):
                history.append(shown(turn))
                stream = await client.chat.completions.create(
                    model="any",
                    messages=history,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                chunks = [chunk async for chunk in stream]
                pieces.append(chunks)
                content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                history.append({"role": "assistant", "content": content})
        return 1.0

    one, other = play(whole), play(streamed)
    assert other.forks == {}
    assert [n.token_ids for n in one.nodes] == [n.token_ids for n in other.nodes]
    for chunks, node in zip(pieces, other.turns, strict=True):
        *deltas, ending, usage = chunks
        assert deltas[0].choices[0].delta.role == "assistant"
        assert {chunk.choices[0].finish_reason for chunk in deltas} == {None}
        assert ending.choices[0].finish_reason == node.finish_reason
        assert not usage.choices and usage.usage.completion_tokens == node.num_sampled


# --- tools


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny checkpoint that was trained to call a tool on any prompt."""
    from transformers import AutoModelForImageTextToText

    path = tmp_path_factory.mktemp("caller")
    registry.write_tiny("qwen_vl", path, seed=0)
    renderer = load_renderer(path, MediaStore(path / "media"))
    model = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng, losses = random.Random(0), list[float]()
    for _ in range(400):
        words = "".join(rng.choices("abcdef gh", k=rng.randrange(1, 40)))
        message = Message(role="tool", content=text(words[:9]))
        talk = [user(words), CALL, *(message, CALL) * 3]
        rendered = renderer.render(talk, [GO], generation_prompt=False)
        ids = torch.tensor([rendered.token_ids])
        labels = torch.full_like(ids, -100)
        for span in rendered.trained:
            labels[0, span.start : span.stop] = ids[0, span.start : span.stop]
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if max(losses[-4:]) < 0.015:
            break
    model.save_pretrained(path)
    return path


@pytest.mark.thorough
@pytest.mark.timeout(300)  # it trains the model first
def test_tool_calling_model_sees_tool_images(caller: Path, media: CountingStore) -> None:
    """Sample, parse, stream and run calls, and answer with a picture, turn after turn."""
    turns: list[tuple[str, str]] = []

    async def rollout(chat: Chat) -> float:
        history: list[Any] = [{"role": "developer", "content": "ab"}, shown(0, "abc")]
        async with agent(chat) as client:
            for turn in range(4):
                request = {"model": "any", "messages": history, "tools": [GO]}
                if turn % 2:
                    message = await streamed_message(client, request)
                else:
                    answer = await client.chat.completions.create(**request)
                    turns.append((answer.choices[0].finish_reason, "whole"))
                    message = answer.choices[0].message.model_dump(exclude_none=True)
                history.append(message)
                for call in message["tool_calls"]:
                    # Like real programs, parse the arguments and write them in another form.
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
                    part = {"type": "image_url", "image_url": {"url": picture_url(100 + turn)}}
                    history.append({"role": "tool", "tool_call_id": call["id"], "content": [part]})
        return 1.0

    settings = ServerSpec.of(
        path=caller, media_roots=(media.root,), device="cpu", max_num_seqs=16, max_model_len=4096
    )
    with live(settings) as server:
        worker = Worker(caller, media, url_of(server), max_tokens=60)
        trace = watched(worker, rollout, temperature=0.0)
        check_chat_endpoint(url_of(server), caller.name, trace)
    assert trace.forks == {} and len(trace.branches()) == 1 and len(trace.toolsets) == 1
    assert [node.message.tool_calls for node in trace.turns] == [CALL.tool_calls] * 4
    assert turns == [("tool_calls", "whole")] * 2
    assert [n.message.role for n in trace.nodes if n.slots] == ["user", "tool", "tool", "tool"]


def check_chat_endpoint(address: str, model: str, trace: Trace) -> None:
    """The chat endpoint gives the engine the same ids for the same turns."""
    history: list[Any] = [{"role": "developer", "content": "ab"}, shown(0, "abc")]
    with OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        for turn, node in enumerate(trace.turns):
            answer = client.chat.completions.create(
                model=model,
                messages=history,
                tools=[GO],
                temperature=0.0,
                max_tokens=60,
                extra_body={"return_token_ids": True},
            )
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            path = trace.tokens(trace.path(node.id))
            assert answer.prompt_token_ids + choice.token_ids == path
            history.append(choice.message.model_dump(exclude_none=True))
            (call,) = choice.message.tool_calls
            part = {"type": "image_url", "image_url": {"url": picture_url(100 + turn)}}
            history.append({"role": "tool", "tool_call_id": call.id, "content": [part]})


async def streamed_message(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Assemble a message from stream chunks, as programs do."""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"type": "function", "function": {}})
            call["id"] = piece.id or call["id"]
            function = call["function"]
            function["name"] = piece.function.name or function["name"]
            function["arguments"] = function.get("arguments", "") + piece.function.arguments
    return {"role": "assistant", "content": None, "tool_calls": [calls[k] for k in sorted(calls)]}


# --- several at once


def test_sub_agents_may_send_concurrent_requests(play: Any) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:

            async def sub(number: int) -> None:
                history: list[Any] = [{"role": "system", "content": f"You are {number}."}]
                for turn in range(3):
                    history.append(shown(10 * number + turn))
                    answer = await client.chat.completions.create(model="m", messages=history)
                    history.append(answer.choices[0].message.model_dump(exclude_none=True))

            await asyncio.gather(*map(sub, range(4)))
        return 1.0

    trace = play(rollout)
    assert len(trace.branches()) == 4 and len(trace.turns) == 12
    # Each starts its own branch, and all its turns stay on that branch.
    assert trace.forks == {"diverged": 3}


def test_blocking_client_and_separate_program_work_as_agents(play: Any, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys\n"
        "from openai import OpenAI\n"
        "client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])\n"
        "history = [{'role': 'user', 'content': 'hello'}]\n"
        "said = client.chat.completions.create(model='m', messages=history).choices[0].message\n"
        "history += [said, {'role': 'user', 'content': 'and?'}]\n"
        "client.chat.completions.create(model='m', messages=history)\n"
    )

    def blocking(base_url: str, api_key: str) -> None:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            client.chat.completions.create(model="m", messages=[shown(1)])
        subprocess.run([sys.executable, str(program), base_url, api_key], check=True, timeout=100)

    async def rollout(chat: Chat) -> float:
        await asyncio.to_thread(blocking, chat.base_url, chat.api_key)
        return 1.0

    assert len(play(rollout).turns) == 3


def test_too_long_prompt_raises_the_sdk_context_length_error(play: Any) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            long = {"role": "user", "content": "a b" * 3000}
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=[long])
            assert caught.value.code == "context_length_exceeded"
            await client.chat.completions.create(model="m", messages=[shown(0)])
        return 1.0

    trace = play(rollout)
    assert len(trace.turns) == 1 and len(trace.refused_requests) == 1 and trace.forks == {}
