"""The generate client: what it tries again, how long, and what it says when it gives up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from agents import listening
from aiohttp import web

from sightline.errors import EngineError
from sightline.inference.errors import STATUS_BY_TYPE, build_engine_error, encode_error
from sightline.rollout.client import GenerateClient
from sightline.wire.generate import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    SamplingParams,
    TokenLogprob,
)

REQUEST = GenerateRequest.of([1, 2], [], SamplingParams(stop_token_ids=(3,)))
LOGPROBS = Logprobs([TokenLogprob(3, -0.5)])
ANSWER = msgspec.json.encode(GenerateResponse("", [Choice(0, [3], "stop", LOGPROBS)]))


class Refusing:
    """Answers with errors of the given types, then as it should."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.asked: list[float] = []
        self._kinds: Iterator[str] = iter(kinds)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        self.asked.append(time.monotonic())
        kind = next(self._kinds, None)
        if kind is None:
            return web.Response(body=ANSWER)
        status, body, headers = encode_error(
            build_engine_error(kind, f"token_ids: {kind}", "mend it")
        )
        return web.Response(body=body, status=status, headers=headers)


def ask(server: Refusing, **more: Any) -> GenerateResponse:
    async def main() -> GenerateResponse:
        async with listening(server.app()) as address:
            client = GenerateClient(address, **more)
            try:
                return await client.generate(REQUEST)
            finally:
                await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", [kind for kind, status in STATUS_BY_TYPE.items() if status != 503])
def test_what_cannot_heal_is_asked_once(kind: str) -> None:
    server = Refusing([kind] * 5)
    with pytest.raises(EngineError) as caught:
        ask(server)
    assert len(server.asked) == 1
    assert (caught.value.kind, caught.value.status) == (kind, STATUS_BY_TYPE[kind])
    assert caught.value.problem.startswith(f"token_ids: {kind}") and caught.value.fix == "mend it"


def test_what_may_heal_is_asked_again_and_not_before_the_server_wants_it() -> None:
    server = Refusing(["media_unavailable", "overloaded"])
    assert ask(server).choices[0].token_ids == [3]
    first, second, third = server.asked
    assert second - first > 0.7 and third - second > 0.7  # Retry-After: 1, spread by a quarter


def test_the_deadline_ends_it_with_the_last_reason() -> None:
    server = Refusing(["overloaded"] * 1000)
    with pytest.raises(EngineError) as caught:
        ask(server, deadline_s=2.0)
    assert caught.value.kind == "overloaded" and 2 <= len(server.asked) <= 4


def test_the_deadline_begins_with_the_first_failure() -> None:
    """A generation that took longer than it, and was then refused by a server that ends."""
    deadline_s = 0.5
    statuses = iter([503, 200])

    async def generate(http: web.Request) -> web.Response:
        status = next(statuses)
        if status == 200:
            return web.Response(body=ANSWER)
        await asyncio.sleep(deadline_s + 0.1)
        _, body, _ = encode_error(
            build_engine_error("stopping", "the server is ending", "ask another")
        )
        return web.Response(body=body, status=status)

    async def main() -> GenerateResponse:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        async with listening(app) as address:
            client = GenerateClient(address, deadline_s=deadline_s)
            try:
                return await client.generate(REQUEST)
            finally:
                await client.close()

    assert asyncio.run(main()).choices[0].token_ids == [3]


def test_a_server_that_is_away_is_tried_until_the_deadline() -> None:
    client = GenerateClient("http://127.0.0.1:9", deadline_s=2.0)
    with pytest.raises(EngineError) as caught:
        asyncio.run(closing(client))
    assert caught.value.kind == "unreachable" and client.counts.retries >= 2


async def closing(client: GenerateClient) -> None:
    try:
        await client.generate(REQUEST)
    finally:
        await client.close()


def test_other_settings_are_shown_beside_the_servers() -> None:
    with pytest.raises(EngineError) as caught:
        ask(Refusing(["fingerprint"]), settings={"patch": 14})
    assert caught.value.problem == 'token_ids: fingerprint; ours: {"patch": 14}'
