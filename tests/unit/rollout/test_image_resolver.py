"""Ten thousand bodies that nobody would send: refused by path, or taken; never anything else."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from agents import LOOK, Worker, listening, picture_url, shown

from sightline.bench.harness.scripted_policy import ScriptedPolicy
from sightline.envs import Chat
from sightline.errors import MediaError, MessageError
from sightline.families import load_renderer
from sightline.media import ImageIngestor, MediaStore
from sightline.rollout.openai_api.request import read_chat_request, resolve_images
from sightline.trace import Trace, encode_trace
from sightline.trace import decode_trace as decode_trace

NUM_BODIES = 10_000
NUM_SENT = 150
"""Of these, how many go through a real endpoint, to the model and back."""

PNG = base64.b64decode(picture_url(0).partition(",")[2])
ODD_URLS = (
    "file:///etc/passwd", "file:///proc/self/environ", "http://10.0.0.1/a.png", "ftp://a/b",
    "https://169.254.169.254/", "data:image/png;base64,", "data:image/png,abc", "data:",
    "data:text/html;base64,PGI+", "media:sha256:" + "0" * 64, "media:sha256:..%2f..%2f",
    "media:sha256:" + "f" * 64,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1e308, 2**70, "", " ", "text", "image_url", "user", "tool", [], {},
    [[]], [None], [3], ["a"], {"url": None}, {"url": 3}, {"url": {}}, {"type": "text"},
    {"type": "image"}, {"type": ["image"]}, {"type": "video"}, *ODD_URLS, "\x00", "\u202e",
    "x" * 5000,
    {"ref": {"digest": "0" * 64}}, {"pixel_values": [0.1]}, {"a": {"b": {"c": [1, 2, {"d": 3}]}}},
)  # fmt: skip


def bases() -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    image = {"type": "image_url", "image_url": {"url": picture_url(0)}}
    return [
        {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
        {"model": "m", "messages": [shown(0), {"role": "assistant", "content": "ok"}, shown(1)]},
        {
            "model": "m",
            "stream": False,
            "max_tokens": 5,
            "temperature": 0.5,
            "tools": [LOOK],
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "go", "image_url": None}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": [image]},
            ],
        },
    ]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key or index in it."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def bend(body: dict[str, Any], rng: random.Random) -> None:
    """One change somewhere in the structure."""
    container, key = rng.choice(list(places(body)))
    kind = rng.randrange(5)
    if kind == 0 and len(container) > 1:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        name = rng.choice(["type", "role", "content", "url", "image", "ref", "odd"])
        container[name] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif kind == 2 and isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), copy.deepcopy(container[key]))
    else:
        container[key] = copy.deepcopy(rng.choice(ODD_VALUES))


def damaged_image(rng: random.Random) -> str:
    data = bytearray(PNG)
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.1:
        data = bytearray(rng.randbytes(rng.randrange(100)))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    if rng.random() < 0.1:
        at = rng.randrange(len(url))
        url = url[:at] + rng.choice("\n=%é\\, ") + url[at:]
    return url


def fuzzed(rng: random.Random) -> bytes:
    body = copy.deepcopy(rng.choice(bases_once))
    if rng.random() < 0.3:
        for container, key in [(c, k) for c, k in places(body) if k == "url"][:1]:
            odd = rng.random() < 0.3
            container[key] = rng.choice(ODD_URLS) if odd else damaged_image(rng)
    for _ in range(rng.randrange(4)):
        bend(body, rng)
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.25:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice(
                [b"\xff", b"\\ud800", b"\0", b"{", b"]", b'"', b",", rng.randbytes(2)]
            )
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


bases_once = bases()


def test_a_fuzzed_body_is_taken_or_refused_with_the_cure(
    tiny_model: Path, store: MediaStore
) -> None:
    rng = random.Random(5)
    resolver = ImageIngestor(store)
    renderer = load_renderer(tiny_model, store, resolver=resolver)
    num_taken, refusals = 0, dict[str, int]()
    for _ in range(NUM_BODIES):
        body = fuzzed(rng)
        try:
            asked = read_chat_request(body)
            messages = resolve_images(asked.messages, resolver.resolve)
            num_taken += bool(renderer.read_conversation(messages))
        except (MessageError, MediaError) as error:
            assert error.fix and error.problem
            name = type(error).__name__
            refusals[name] = refusals.get(name, 0) + 1
    # Neither a resolver that takes everything nor one that takes nothing would pass.
    assert num_taken > NUM_BODIES / 20 and min(refusals.values()) > NUM_BODIES / 1000, refusals
    assert {"MessageError", "MediaRefused", "MediaMissing"} <= set(refusals)
    assert sum(refusals.values()) + num_taken == NUM_BODIES
    for digest in store.digests():
        assert store.get(store.get_ref(digest))


def test_fuzzed_bodies_leave_an_endpoint_and_its_trace_whole(
    tiny_model: Path, store: MediaStore
) -> None:
    rng = random.Random(7)
    statuses: dict[int, int] = {}

    async def rollout(chat: Chat) -> float:
        headers = {"authorization": f"Bearer {chat.api_key}", "content-type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(NUM_SENT):
                async with session.post(
                    chat.base_url + "/chat/completions", data=fuzzed(rng)
                ) as answer:
                    statuses[answer.status] = statuses.get(answer.status, 0) + 1
                    body = await answer.read()
                    if answer.status != 200:
                        assert set(json.loads(body)["error"]) == {
                            "message",
                            "type",
                            "param",
                            "code",
                        }
        return 1.0

    async def main() -> Trace:
        async with listening(ScriptedPolicy().app()) as address:
            return await Worker(tiny_model, store, address).play(rollout)

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    assert set(statuses) == {200, 400, 404, 422}
    assert len(trace.turns) == statuses[200]
    assert len(trace.refused_requests) == NUM_SENT - statuses[200]
    assert decode_trace(encode_trace(trace)).nodes == trace.nodes
