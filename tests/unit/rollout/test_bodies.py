"""Request bodies of agents: a repeated history is cheap, and no body is kept for long."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from agents import CountingStore, Worker, agent, listening, picture_url, shown
from aiohttp import web
from scripted_policy import ScriptedPolicy

from sightline.envs import Chat
from sightline.media import ImageIngestor, MediaRef
from sightline.trace import Trace
from sightline.transport.http_server import ConnectionLimits
from sightline.wire.control import RolloutRequest

NUM_TURNS = 4


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "media")


class Asked(ImageIngestor):
    """Counts the urls that it resolves."""

    num_asked = 0

    def resolve(self, url: str, path: str, takes_video: bool = True) -> MediaRef:
        self.num_asked += 1
        return super().resolve(url, path, takes_video)


class Pages:
    """A web server whose pages change with every request."""

    def __init__(self) -> None:
        self.num_shown = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{page}", self._page)
        return app

    async def _page(self, http: web.Request) -> web.Response:
        self.num_shown += 1
        data = base64.b64decode(picture_url(self.num_shown).partition(",")[2])
        return web.Response(body=data, content_type="image/png")


async def loop(chat: Chat, urls: list[str]) -> float:
    """Sends one more picture per turn, and repeats all earlier ones."""
    history: list[Any] = []
    async with agent(chat) as client:
        for url in urls:
            part = {"type": "image_url", "image_url": {"url": url}}
            history.append({"role": "user", "content": [part]})
            answer = await client.chat.completions.create(model="m", messages=history)
            history.append(answer.choices[0].message.model_dump(exclude_none=True))
    return 1.0


@pytest.mark.parametrize("scheme", ["data", "media", "file", "http"])
def test_repeated_history_is_not_processed_again(
    tiny_model: Path, store: CountingStore, tmp_path: Path, scheme: str
) -> None:
    pages = Pages()

    async def main() -> tuple[Trace, Asked]:
        async with listening(ScriptedPolicy().app()) as server, listening(pages.app()) as web_host:
            resolver = Asked(store, [tmp_path], [web_host.removeprefix("http://")])
            urls = [picture_url(100 + turn) for turn in range(NUM_TURNS)]
            data = [base64.b64decode(url.partition(",")[2]) for url in urls]
            if scheme == "media":
                urls = [store.put(image).url for image in data]
            elif scheme == "file":
                urls = [f"file://{tmp_path}/{turn}.png" for turn in range(NUM_TURNS)]
                for turn, image in enumerate(data):
                    (tmp_path / f"{turn}.png").write_bytes(image)
            elif scheme == "http":
                urls = [f"{web_host}/{turn}.png" for turn in range(NUM_TURNS)]
            worker = Worker(tiny_model, store, server, resolver=resolver)
            return await worker.play(lambda chat: loop(chat, urls)), resolver

    trace, resolver = asyncio.run(main())
    assert not trace.error, trace.error
    assert trace.forks == {} and len(trace.turns) == NUM_TURNS == trace.num_images_shown
    assert resolver.num_asked == NUM_TURNS == store.num_put
    assert pages.num_shown == (NUM_TURNS if scheme == "http" else 0)


# --- bodies in transit


async def in_halves(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in two parts, so that its size is unknown at first."""
    half = len(body) // 2
    yield body[:half]
    yield body[half:]


async def post(chat: Chat, data: Any) -> tuple[int, Any]:
    """The status and the body of the answer."""
    headers = {"authorization": f"Bearer {chat.api_key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(chat.base_url + "/chat/completions", data=data) as answer,
    ):
        return answer.status, await answer.json()


async def send_raw(chat: Chat, *head: str) -> str:
    """Return the first line of the answer to a head and the beginning of a body."""
    host, _, port = chat.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = ["POST /v1/chat/completions HTTP/1.1", *head, "content-type: application/json"]
    lines += [f"authorization: Bearer {chat.api_key}", "content-length: 10", "", "{"]
    writer.write("\r\n".join(lines).encode())
    try:
        return (await reader.readline()).decode()
    finally:
        writer.close()


@pytest.mark.parametrize("says_its_size", [True, False])
def test_body_above_the_limit_is_a_413_recorded_in_the_trace(
    tiny_model: Path, store: CountingStore, says_its_size: bool
) -> None:
    async def main() -> Trace:
        async def rollout(chat: Chat) -> float:
            player.chats.interception.max_body_bytes = 2000
            body = json.dumps({"model": "m", "messages": [shown(0)]}).encode()
            assert len(body) > 2000
            status, told = await post(chat, body if says_its_size else in_halves(body))
            error = told["error"]
            assert (status, error["code"]) == (413, "request_too_large")
            assert error["type"] == "invalid_request_error" and "fix: " in error["message"]
            assert "2000 bytes" in error["message"]
            async with agent(chat) as client:
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(model="m", messages=[shown(0)])
                assert caught.value.status_code == 413
                # A refusal has no cost: the agent may continue.
                words: Any = [{"role": "user", "content": "hello"}]
                await client.chat.completions.create(model="m", messages=words)
            return 1.0

        async with listening(ScriptedPolicy().app()) as address:
            with Worker(tiny_model, store, address).player(rollout) as player:
                played = await player.play(RolloutRequest("r", "g", 0, "train", 1, 1.0))
                await player.close()
        return played.trace

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    assert len(trace.turns) == 1 and store.num_put == 0
    assert len(trace.refused_requests) == 2
    assert all(
        "EngineError: the body exceeds" in refused_request
        for refused_request in trace.refused_requests
    )


def test_endpoint_has_the_same_auth_and_limits_as_every_server(
    tiny_model: Path, store: CountingStore
) -> None:
    bodies: list[str] = []

    async def rollout(chat: Chat) -> float:
        bodies.append(await send_raw(chat, "host: evil.example"))
        bodies.append(await send_raw(chat, "host: localhost", "origin: http://evil.example"))
        bodies.append(await send_raw(chat, "host: localhost"))
        return await loop(chat, [picture_url(0)])

    async def main() -> Trace:
        async with listening(ScriptedPolicy().app()) as address:
            with Worker(tiny_model, store, address).player(rollout) as player:
                player.chats.interception.limits = ConnectionLimits(body_s=0.3)
                played = await player.play(RolloutRequest("r", "g", 0, "train", 1, 1.0))
                await player.close()
                return played.trace

    trace = asyncio.run(main())
    assert [line.split()[1] for line in bodies] == ["421", "403", "408"]
    assert len(trace.turns) == 1 and not trace.refused_requests
