"""A server scores given tokens, and a trace that it sampled replays without a difference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from scripted_policy import ScriptedPolicy

from sightline.cli.main import main
from sightline.envs import Conversation, last_images
from sightline.errors import EngineError
from sightline.families import load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import Message, system, user
from sightline.render import Renderer
from sightline.rollout.client import GenerateClient
from sightline.trace import (
    Trace,
    decode_trace,
    encode_trace,
    write_traces,
)
from sightline.view.trace_replay import ReplayReport, ServerPromptScorer, replay_trace
from sightline.wire.generate import (
    GenerateRequest,
    SamplingParams,
)
from tests.logged_chat import chat_to, talking
from tests.serving import Client, Reference, live

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def settings(tiny_model: Path, media: MediaStore) -> ServerSpec:
    # Chunks that split images and sampled runs: a scored prompt must not depend on them.
    return ServerSpec.of(
        path=tiny_model,
        media_roots=(media.root,),
        device="cpu",
        max_model_len=2048,
        prefill_chunk_tokens=37,
    )


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as live_client:
        yield live_client


@pytest.fixture(scope="module")
def renderer(tiny_model: Path, media: MediaStore) -> Renderer:
    return load_renderer(tiny_model, media)


def run(client: Client, script: Callable[[GenerateClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        speaking = GenerateClient(f"http://{client.host}:{client.port}")
        try:
            return await script(speaking)
        finally:
            await speaking.close()

    return asyncio.run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_prompt_logprobs_match_a_plain_forward_pass(
    client: Client, tiny_model: Path, media: MediaStore, temperature: float
) -> None:
    reference = Reference(tiny_model, media)
    ref = media.put(Image.new("RGB", (160, 96), (9, 200, 30)))
    rendered = reference.renderer.render([user("What is ", ref, " this?" * 9), user("Well?")])
    tokens, slots = rendered.token_ids, rendered.slots
    params = SamplingParams(max_tokens=2, temperature=temperature, seed=1, prompt_logprobs=0)
    for _ in range(2):  # the second time keys and values are there, and must not be used
        answer = client.generate(tokens, slots, params)
        assert answer.prompt_logprobs is not None and answer.sightline is not None
        assert answer.sightline.cached_tokens == 0
        assert len(answer.prompt_logprobs) == len(tokens)
        expected = reference.logprobs(tokens[:1], tokens[1:], slots, temperature or 1.0)
        assert answer.prompt_logprobs[0] is None
        for token, entry, value in zip(
            tokens[1:], answer.prompt_logprobs[1:], expected, strict=True
        ):
            if np.isfinite(value):
                assert entry is not None and list(entry) == [token]
                np.testing.assert_allclose(entry[token].logprob, value, atol=TOLERANCE)
            else:
                assert entry is None
    pads = [i for slot in slots for i in range(slot.offset, slot.end)]
    assert pads and all(answer.prompt_logprobs[i] is None for i in pads)


def test_prompt_logprobs_are_optional_and_other_counts_are_refused(client: Client) -> None:
    plain = GenerateRequest.of([5, 6], [], SamplingParams(max_tokens=1))
    status, body, _ = client.call("POST", "/inference/v1/generate", msgspec.json.encode(plain))
    assert status == 200 and b"prompt_logprobs" not in body
    request = GenerateRequest.of([5, 6], [], SamplingParams(max_tokens=1, prompt_logprobs=3))
    error = client.refused(msgspec.json.encode(request))
    assert error.type == "sampling" and "prompt_logprobs" in error.message


async def _rollout(speaking: GenerateClient, renderer: Renderer, media: MediaStore) -> Trace:
    """A windowed conversation, a summary, concurrent sub-agents, a retry and an edit."""
    chat = chat_to(speaking, renderer, media, max_tokens=9, temperature=0.8)

    def page(number: int) -> Message:
        shade = (number, 70, 7 * number)
        return user(f"page {number} ", chat.put(Image.new("RGB", (64, 32 + 32 * number), shade)))

    talk = Conversation(chat, last_images(2))
    for number in range(4):
        await talk.send([page(number)])
    await talk.compact("Sum up.")
    await talk.send([page(5)])
    sides = [talk.branch(), talk.branch(), talk.branch([system("other"), user("a")])]
    await asyncio.gather(*(side.send([page(i)]) for i, side in enumerate(sides)))
    await talk.retry()
    talk.history[0] = user("edited ", chat.put(Image.new("RGB", (32, 32))))
    await talk.send([user("and?")])
    return chat.trace


@pytest.fixture(scope="module")
def trace(client: Client, renderer: Renderer, media: MediaStore) -> Trace:
    return run(client, lambda speaking: _rollout(speaking, renderer, media))


def replayed(
    trace: Trace, client: Client, renderer: Renderer, tolerance: float = TOLERANCE
) -> ReplayReport:
    return run(
        client,
        lambda speaking: replay_trace(trace, renderer, ServerPromptScorer(speaking), tolerance),
    )


def test_replay_command_replays_a_file(
    trace: Trace, client: Client, settings: ServerSpec, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "step_1.msgpack"
    words = ["trace", "replay", str(path), "--model", settings.model.path]
    words += ["--media", str(settings.media_roots[0])]
    words += ["--server", f"http://{client.host}:{client.port}"]
    write_traces(path, [trace])
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "1 traces, 11 turns rendered again" in output and " 0 differences" in output
    assert f"{trace.num_sampled} sampled tokens scored by version 0 (sampled by 0)" in output
    broken = msgspec.structs.replace(
        trace.turns[0].logprobs, data=(trace.turns[0].logprobs.numpy() * 2).tobytes()
    )
    write_traces(path, [damaged(trace, trace.turns[0].id, logprobs=broken)])
    assert main(words) == 1
    assert "trace t node 1: logprobs differ" in capsys.readouterr().out


def damaged(trace: Trace, node: int, **changes: object) -> Trace:
    copy = decode_trace(encode_trace(trace))
    nodes = list(copy.nodes)
    nodes[node] = msgspec.structs.replace(nodes[node], **changes)
    return msgspec.structs.replace(copy, nodes=nodes)


def test_replay_names_each_difference_and_its_position(
    trace: Trace, client: Client, renderer: Renderer
) -> None:
    turn = trace.turns[-1]
    moved = msgspec.structs.replace(
        turn.logprobs, data=(turn.logprobs.numpy() - np.float32(0.5)).tobytes()
    )
    differences = replayed(damaged(trace, turn.id, logprobs=moved), client, renderer)
    assert [(d.node, d.what) for d in differences.differences] == [(turn.id, "logprobs")]
    assert differences.max_logprob_change == pytest.approx(0.5, abs=1e-4)
    assert [d.what for d in replayed(trace, client, renderer, tolerance=1.0).differences] == []

    first = trace.nodes[0]
    other = msgspec.structs.replace(first.slots[0], pixel_digest="f" * 32)
    differences = replayed(damaged(trace, 0, slots=(other,)), client, renderer)
    assert {(d.node, d.what) for d in differences.differences} == {(0, "pixels")}

    ids = first.token_ids.numpy().copy()
    ids[-3] += 1
    array = msgspec.structs.replace(first.token_ids, data=ids.tobytes())
    differences = replayed(damaged(trace, 0, token_ids=array), client, renderer)
    # Bridged turns continue from the recorded tokens. Turns that were rendered in full differ.
    rendered = [
        t.node for t in replayed(trace, client, renderer).turns if t.prompt_origin == "rendered"
    ]
    differ = [node for node in rendered if 0 in trace.path(node)]
    assert [d.node for d in differences.differences if d.what == "ids"] == differ
    assert f"token {len(ids) - 3} of " in differences.differences[0].detail

    differences = replayed(damaged(trace, turn.id, message=user("no")), client, renderer)
    assert [(d.node, d.what) for d in differences.differences] == [(turn.id, "message")]


def test_missing_image_is_a_difference_and_dead_server_is_an_error(
    trace: Trace, settings: ServerSpec, renderer: Renderer, tmp_path: Path
) -> None:
    with live(settings.replace(media_roots=(tmp_path / "empty",))) as other:
        differences = replayed(trace, other, renderer)
    assert {d.what for d in differences.differences} == {"refused"}
    assert "media_missing" in differences.differences[0].detail
    speaking = GenerateClient("http://127.0.0.1:9", deadline_s=0.1)

    async def main() -> None:
        try:
            await replay_trace(trace, renderer, ServerPromptScorer(speaking))
        finally:
            await speaking.close()

    with pytest.raises(EngineError, match="does not answer"):
        asyncio.run(main())


def test_server_without_scoring_is_refused(
    trace: Trace, renderer: Renderer, media: MediaStore
) -> None:
    async def main() -> None:
        async with talking(ScriptedPolicy(), renderer, media) as chat:
            await replay_trace(trace, renderer, ServerPromptScorer(chat.client))

    with pytest.raises(EngineError, match="no prompt logprobs"):
        asyncio.run(main())
