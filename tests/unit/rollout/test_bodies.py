"""What agents send: a history that comes again costs nothing, and no body is kept for long."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from agents import CountingStore, Worker, agent, listening, picture_url
from aiohttp import web

from sightline.envs import Chat
from sightline.media import Ingest, MediaRef
from sightline.rollout.scripted import ScriptedPolicy
from sightline.trace import Trace

NUM_TURNS = 4


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "media")


class Asked(Ingest):
    """Counts the urls that it is asked for."""

    num_asked = 0

    def resolve(self, url: str, path: str) -> MediaRef:
        self.num_asked += 1
        return super().resolve(url, path)


class Pages:
    """A web server whose pages show something else every time they are looked at."""

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
    """Shows one picture a turn, all of them again with every request."""
    history: list[Any] = []
    async with agent(chat) as client:
        for url in urls:
            part = {"type": "image_url", "image_url": {"url": url}}
            history.append({"role": "user", "content": [part]})
            answer = await client.chat.completions.create(model="m", messages=history)
            history.append(answer.choices[0].message.model_dump(exclude_none=True))
    return 1.0


@pytest.mark.parametrize("scheme", ["data", "media", "file", "http"])
def test_a_history_that_comes_again_is_not_looked_at_again(
    tiny_model: Path, store: CountingStore, tmp_path: Path, scheme: str
) -> None:
    pages = Pages()

    async def main() -> tuple[Trace, Asked]:
        async with listening(ScriptedPolicy().app()) as server, listening(pages.app()) as web_host:
            door = Asked(store, [tmp_path], [web_host.removeprefix("http://")])
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
            worker = Worker(tiny_model, store, server, door=door)
            return await worker.play(lambda chat: loop(chat, urls)), door

    trace, door = asyncio.run(main())
    assert not trace.error, trace.error
    assert trace.forks == {} and len(trace.turns) == NUM_TURNS == trace.num_images_shown
    assert door.num_asked == NUM_TURNS == store.num_put
    assert pages.num_shown == (NUM_TURNS if scheme == "http" else 0)
