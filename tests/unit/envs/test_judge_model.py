"""A judge model behind a real HTTP server, with all its failures."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from sightline.envs.judge_model import JudgeModel
from sightline.errors import JudgeFailed
from sightline.media import MediaStore
from sightline.message import user

Answer = Callable[[int], web.Response | Awaitable[web.Response]]


def says(text: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def ask(answer: Answer, store: MediaStore, *parts: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """Return the score from a server that gives `answer(n)` to the n-th request."""
    bodies: list[Any] = []

    async def serve(http: web.Request) -> web.Response:
        bodies.append((await http.json(), http.headers.get("Authorization")))
        reply = answer(len(bodies))
        return reply if isinstance(reply, web.Response) else await reply

    async def main() -> Any:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        judge = JudgeModel(f"{site.name}/v1", "strict", "key", first_wait_s=0.001, **settings)
        try:
            return await judge.score([user(*(parts or ("How good is it?",)))], store.get)
        except JudgeFailed as error:
            return error
        finally:
            await runner.cleanup()

    return asyncio.run(main()), bodies


def test_last_score_in_the_answer_counts(store: MediaStore) -> None:
    score, bodies = ask(lambda n: says("Score: 1 is too much.\n**Score:** 0.25"), store)
    assert score == 0.25
    body, key = bodies[0]
    assert body["model"] == "strict" and key == "Bearer key"


def test_images_are_sent_as_data_urls_of_the_stored_bytes(store: MediaStore) -> None:
    ref = store.put(Image.new("RGB", (40, 30), (1, 2, 3)))
    _, bodies = ask(lambda n: says("score 1"), store, "this:", ref)
    text, image = bodies[0][0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "this:"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64" and base64.b64decode(data) == store.get(ref)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_errors_are_retried(store: MediaStore, status: int) -> None:
    score, bodies = ask(lambda n: says("score 1") if n == 3 else web.Response(status=status), store)
    assert score == 1.0 and len(bodies) == 3


def test_judge_timeout_is_a_failure(store: MediaStore) -> None:
    async def slow() -> web.Response:
        await asyncio.sleep(60)
        return says("score 1")

    error, bodies = ask(lambda n: slow(), store, timeout_s=0.05, tries=2)
    assert isinstance(error, JudgeFailed) and "Timeout" in error.problem and len(bodies) == 2


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (says("excellent!"), "gave no score"),
        (says("Score: 7"), "outside 0.0 to 1.0"),
        (says(None), "gave no score"),
        (web.json_response({"choices": []}), "not a chat completion"),
        (web.Response(text="<html>"), "does not answer as an OpenAI endpoint"),
    ],
)
def test_an_answer_without_a_verdict_is_a_failure(
    store: MediaStore, answer: web.Response, problem: str
) -> None:
    text, kind = answer.body, answer.content_type

    def again(n: int) -> web.Response:
        return web.Response(body=text, content_type=kind)

    error, _ = ask(again, store, tries=2)
    assert isinstance(error, JudgeFailed) and problem in error.problem
