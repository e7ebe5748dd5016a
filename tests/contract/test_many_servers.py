"""Results do not depend on which server answers or what it has cached.

A client that dies affects no other client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from agents import Worker, listening, picture, shown
from aiohttp import web
from serving import GREEDY, Client, Together, embedded, live

from sightline.envs import Chat
from sightline.families import load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaRef, MediaStore
from sightline.message import user
from sightline.trace import Trace
from sightline.wire.generate import GenerateRequest, SamplingParams

NUM_ROLLOUTS, NUM_TURNS = 6, 3


@pytest.fixture
def settings(tiny_model: Path, store: MediaStore) -> ServerSpec:
    return ServerSpec.of(
        path=tiny_model,
        media_roots=(store.root,),
        device="cpu",
        max_num_seqs=16,
        max_model_len=1024,
        weights_root="/",
    )


@asynccontextmanager
async def round_robin(servers: list[str]) -> AsyncIterator[tuple[str, list[int]]]:
    """Yield an address that sends each generation to the next server, and the list of statuses."""
    turn, statuses = itertools.cycle(servers), list[int]()
    async with aiohttp.ClientSession() as session:

        async def pass_on(http: web.Request) -> web.Response:
            body, generates = await http.read(), http.method == "POST"
            address = (next(turn) if generates else servers[0]) + http.path
            headers = {"content-type": http.content_type}
            async with session.request(http.method, address, data=body, headers=headers) as answer:
                statuses.extend([answer.status] * generates)
                return web.Response(body=await answer.read(), status=answer.status)

        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", pass_on)
        async with listening(app) as address:
            yield address, statuses


def play_all(servers: list[Client], model: Path, store: MediaStore) -> list[Trace]:
    """Play rollouts concurrently, each turn on another server."""

    def talk(number: int) -> Any:
        async def rollout(chat: Chat) -> float:
            for turn in range(NUM_TURNS):
                await chat.send([shown(10 * number + turn)])
            return 1.0

        return rollout

    async def main() -> list[Trace]:
        addresses = [f"http://{server.host}:{server.port}" for server in servers]
        async with round_robin(addresses) as (address, statuses):
            worker = Worker(model, store, address, max_tokens=12)
            played = [worker.play(talk(n), temperature=0.0) for n in range(NUM_ROLLOUTS)]
            traces = await asyncio.gather(*played)
        assert statuses == [200] * (NUM_ROLLOUTS * NUM_TURNS)
        return list(traces)

    traces = asyncio.run(main())
    assert not any(trace.error for trace in traces)
    return traces


def test_two_servers_and_an_uncached_server_match_one_cached_server(
    settings: ServerSpec, tiny_model: Path, store: MediaStore
) -> None:
    bare = settings.replace(pixel_cache_mb=0, feature_cache_mb=0, enable_prefix_caching=False)
    with ExitStack() as stack:
        cached, one, two, none = (
            stack.enter_context(live(each)) for each in (settings, settings, settings, bare)
        )
        expected = play_all([cached], tiny_model, store)
        for servers in ([one, two], [none]):
            traces = play_all(servers, tiny_model, store)
            for trace, known in zip(traces, expected, strict=True):
                assert [n.token_ids for n in trace.nodes] == [n.token_ids for n in known.nodes]
                assert [n.slots for n in trace.nodes] == [n.slots for n in known.nodes]
        assert cached.totals()["cached_tokens"] > 0 and none.totals()["cached_tokens"] == 0
        assert min(one.totals()["requests"], two.totals()["requests"]) == 9
        assert none.totals()["pixel_cache_hits"] == none.totals()["feature_cache_hits"] == 0
        assert sum(server.totals()["failed"] for server in (cached, one, two, none)) == 0


class Gated(MediaStore):
    """Holds back every image until the gate is open."""

    def __init__(self, store: MediaStore) -> None:
        super().__init__(store.root)
        self.gate = threading.Event()

    def image(self, ref: MediaRef) -> Any:
        assert self.gate.wait(60)
        return super().image(ref)


POST = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
headers = {"content-type": "application/json"}
connection.request("POST", "/inference/v1/generate", sys.stdin.buffer.read(), headers)
print(connection.getresponse().status)
"""


@pytest.mark.parametrize("num_before", [0, 1], ids=["begun", "queued"])
def test_killed_client_does_not_cancel_an_image_load_shared_with_another(
    settings: ServerSpec,
    tiny_model: Path,
    store: MediaStore,
    num_before: int,
) -> None:
    """One thread decodes another image first.

    One request waits for the image, another for the whole prompt, which is computed once.
    """
    gated = Gated(store)
    renderer = load_renderer(tiny_model, store)
    ref = store.put(picture(5))
    rendered, prompts = (
        renderer.render([user(words, ref)]) for words in ("What is it?", "What does it show?")
    )
    other = renderer.render([user("And before?", store.put(picture(6)))])
    body = msgspec.json.encode(GenerateRequest.of(rendered.token_ids, rendered.slots, GREEDY))
    with embedded(settings, store=gated) as server:
        together = Together(server)
        before = [together.generate(other.token_ids, other.slots) for _ in range(num_before)]
        server.wait_for("now", "waiting", num_before)
        words = [sys.executable, "-c", POST, server.host, str(server.port)]
        first = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert first.stdin is not None
        first.stdin.write(body)
        first.stdin.close()
        server.wait_for("now", "waiting", num_before + 1)  # the flight is its own
        second = together.generate(prompts.token_ids, prompts.slots)
        server.wait_for("totals", "pixel_cache_joined", 1)
        third = together.generate(rendered.token_ids, rendered.slots)
        server.wait_for("now", "waiting", num_before + 3)
        first.kill()
        first.wait()
        server.wait_for("totals", "cancelled", 1)
        assert not second.done() and not third.done()
        gated.gate.set()
        for answer in (*before, second, third):
            assert len(answer.result(60).choices[0].token_ids) == GREEDY.max_tokens
        totals = server.totals()
        assert totals["images_made"] == num_before + 1
        assert totals["images_failed"] == totals["failed"] == 0
    assert first.stdout is not None and first.stdout.read() == b""
    first.stdout.close()


def test_waiting_requests_are_also_bounded_by_bytes(
    settings: ServerSpec, tiny_model: Path, store: MediaStore
) -> None:
    """A picture of 64x64 takes 12,288 bytes once it is decoded."""
    renderer = load_renderer(tiny_model, store)
    rendered = [renderer.render([user(store.put(picture(n, 64, 64)))]) for n in range(4)]
    small = settings.replace(max_num_seqs=1, max_waiting_mb=30_000 / 2**20)
    with live(small) as server:
        together = Together(server)
        long = SamplingParams(max_tokens=300, seed=1)
        running = together.generate(rendered[0].token_ids, rendered[0].slots, long)
        server.wait_for("now", "running", 1)
        waiting = [
            together.generate(one.token_ids, one.slots, SamplingParams(max_tokens=1, seed=1))
            for one in rendered[1:3]
        ]
        server.wait_for("now", "waiting", 2)
        assert server.now()["waiting_bytes"] >= 2 * 12_288
        request = GenerateRequest.of(rendered[3].token_ids, rendered[3].slots, GREEDY)
        error = server.refused(json.dumps(msgspec.to_builtins(request)).encode())
        assert (error.code, error.type) == (503, "overloaded") and "bytes" in error.message
        for answer in (running, *waiting):
            assert answer.result().choices
        assert server.now()["waiting_bytes"] == 0
