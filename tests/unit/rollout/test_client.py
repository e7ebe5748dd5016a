"""The generate client: retries, their duration, and the final error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import Worker, listening
from aiohttp import web
from PIL import Image
from scripted_policy import ScriptedPolicy

from sightline.config import RunFile
from sightline.errors import EngineError, MediaRefused
from sightline.inference.errors import STATUS_BY_TYPE, build_engine_error, error_response
from sightline.media import MediaStore
from sightline.message import Message, user
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.client import GenerateClient
from sightline.trace import Trace
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
    """Answers with errors of the given types, then correctly."""

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
        refusal = error_response(build_engine_error(kind, f"token_ids: {kind}", "mend it"))
        headers = {k: v for k, v in refusal.headers.items() if k == "retry-after"}
        return web.Response(body=refusal.body, status=refusal.status_code, headers=headers)


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
def test_permanent_errors_are_not_retried(kind: str) -> None:
    server = Refusing([kind] * 5)
    with pytest.raises(EngineError) as caught:
        ask(server)
    assert len(server.asked) == 1
    assert (caught.value.kind, caught.value.status) == (kind, STATUS_BY_TYPE[kind])
    assert caught.value.problem.startswith(f"token_ids: {kind}") and caught.value.fix == "mend it"


def test_transient_errors_are_retried_after_the_servers_delay() -> None:
    server = Refusing(["media_unavailable", "overloaded"])
    assert ask(server).choices[0].token_ids == [3]
    first, second, third = server.asked
    assert second - first > 0.7 and third - second > 0.7  # Retry-After: 1, spread by a quarter


def test_deadline_ends_retries_with_the_last_reason() -> None:
    server = Refusing(["overloaded"] * 1000)
    with pytest.raises(EngineError) as caught:
        ask(server, deadline_s=2.0)
    assert caught.value.kind == "overloaded" and 2 <= len(server.asked) <= 4


def test_deadline_starts_at_the_first_failure() -> None:
    """A long generation that a stopping server then refuses."""
    deadline_s = 0.5
    statuses = iter([503, 200])

    async def generate(http: web.Request) -> web.Response:
        status = next(statuses)
        if status == 200:
            return web.Response(body=ANSWER)
        await asyncio.sleep(deadline_s + 0.1)
        error = build_engine_error("stopping", "the server is ending", "ask another")
        return web.Response(body=error_response(error).body, status=status)

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


# --- impossible answers

STOP, TEXT, PAD = 3, 5, 9
ASKED = GenerateRequest.of([1, 2], [], SamplingParams(max_tokens=3, stop_token_ids=(STOP,)))


def build_answer(*said: int, **changes: Any) -> dict[str, Any]:
    """Return a correct answer with some changes."""
    ids = list(said or (TEXT, TEXT, STOP))
    logprobs = changes.pop("values", [-0.5] * len(ids))
    entries = [
        {"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=False)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "stop" if ids[-1] == STOP else "length",
        "logprobs": {"content": entries},
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return {"request_id": "", "choices": [choice | changes], "prompt_token_ids": [1, 2]}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


WRONG = {
    "more tokens than asked": build_answer(TEXT, TEXT, TEXT, STOP),
    "an unknown finish reason": build_answer(finish_reason="tool_calls"),
    "too short for length": build_answer(TEXT, TEXT),
    "stopped without a stop token": build_answer(TEXT, TEXT, TEXT, finish_reason="stop"),
    "stopped without a token": build_answer(token_ids=[], values=[], weight_versions=[]),
    "on after a stop token": build_answer(TEXT, STOP, TEXT),
    "an id outside of the vocabulary": build_answer(TEXT, 10, STOP),
    "an id below 0": build_answer(TEXT, -1, STOP),
    "a banned id": build_answer(TEXT, PAD, STOP),
    "a logprob over 0": build_answer(values=[-0.5, 0.3, -0.5]),
    "a logprob that is no number": build_answer(values=[-0.5, None, -0.5]),
    "a logprob that JSON cannot hold": build_answer(values=[-0.5, float("nan"), -0.5]),
    "too few logprobs": build_answer(values=[-0.5, -0.5]),
    "no logprobs": build_answer(logprobs=None),
    "replaced tokens": build_answer(token_ids=[TEXT, 6, STOP]),
    "another index": build_answer(index=1),
    "no choice": {**build_answer(), "choices": []},
    "two choices": {**build_answer(), "choices": build_answer()["choices"] * 2},
    "versions with a gap": build_answer(weight_versions=[span("0", 0, 1), span("0", 2, 3)]),
    "versions of less": build_answer(weight_versions=[span("0", 0, 2)]),
    "versions of more": build_answer(weight_versions=[span("0", 0, 4)]),
    "a version that is none": build_answer(weight_versions=[span("new", 0, 3)]),
}


def answered(answer: bytes) -> GenerateResponse:
    """Return a client's response from a server that gives this answer to all requests."""
    known: dict[str, Any] = {"vocab_size": 10, "banned_token_ids": (PAD,), "max_model_len": 100}

    async def generate(http: web.Request) -> web.Response:
        return web.Response(body=answer)

    async def main() -> GenerateResponse:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        async with listening(app) as address:
            client = GenerateClient(address, **known)
            try:
                return await client.generate(ASKED)
            finally:
                await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("wrong", [*WRONG, "no JSON", "no object"])
def test_invalid_sampler_answer_is_refused(wrong: str) -> None:
    garbage = {"no JSON": b"\xff\xfe{", "no object": b"[1]"}
    answer = garbage.get(wrong) or json.dumps(WRONG[wrong]).encode()
    with pytest.raises(EngineError, match="gave a wrong answer") as caught:
        answered(answer)
    assert caught.value.kind == "wrong_answer"


def test_run_chats_refuse_answers_with_forbidden_tokens(
    tiny_model: Path, store: MediaStore
) -> None:
    values = {"model": {"path": str(tiny_model)}, "env": {"name": "color_codeword"}}
    config = RunFile.model_validate(values)
    answers: list[dict[str, Any]] = []

    async def generate(http: web.Request) -> web.Response:
        return web.json_response(answers[-1])

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        async with listening(app) as address:
            chats = build_policy_chats(config, [address], store)
            for token, problem in (
                (chats.renderer.vocab_size, "for a vocabulary of"),
                (chats.renderer.pad_token_ids[0], "which is banned"),
            ):
                answers.append(build_answer(TEXT, token, STOP))
                with pytest.raises(EngineError, match=problem):
                    await chats.client.generate(ASKED)
            answers.append(build_answer(TEXT, TEXT))
            long = config.inference.max_model_len - 2
            await chats.client.generate(msgspec.structs.replace(ASKED, token_ids=[1] * long))
            await chats.close()

    asyncio.run(main())


def test_run_chats_read_only_files_of_allowed_roots(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    values = {"model": {"path": str(tiny_model)}, "env": {"name": "color_codeword"}}
    config = RunFile.model_validate(values)
    for name in ("allowed", "other"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (64, 64)).save(tmp_path / name / "a.png")
    media = config.media.model_copy(update={"file_roots": (str(tmp_path / "allowed"),)})
    allowing = config.model_copy(update={"media": media})

    def read(config: RunFile, name: str) -> list[Message]:
        url = {"url": f"file://{tmp_path / name}/a.png"}
        image = {"type": "image_url", "image_url": url}
        messages = [{"role": "user", "content": [image]}]

        async def main() -> list[Message]:
            chats = build_policy_chats(config, ["http://127.0.0.1:1"], store)
            try:
                return chats.renderer.read_messages(messages)
            finally:
                await chats.close()

        return asyncio.run(main())

    assert read(allowing, "allowed")[0].refs
    for refusing, name in ((allowing, "other"), (config, "allowed")):
        with pytest.raises(MediaRefused, match="is not below an allowed file root"):
            read(refusing, name)


class Lies(ScriptedPolicy):
    """A policy with impossible logprobs."""

    def answer(self, request: GenerateRequest, digests: list[str]) -> GenerateResponse:
        right = super().answer(request, digests)
        entries = [TokenLogprob(token, 0.5) for token in right.choices[0].token_ids]
        choice = msgspec.structs.replace(right.choices[0], logprobs=Logprobs(entries))
        return msgspec.structs.replace(right, choices=[choice])


@pytest.mark.parametrize("branches", [False, True])
def test_an_environment_cannot_hide_a_wrong_answer(
    tiny_model: Path, store: MediaStore, branches: bool
) -> None:
    async def rollout(chat: Any) -> float:
        with contextlib.suppress(Exception):
            await (chat.branch() if branches else chat).send([user("q")])
        return 1.0

    async def main() -> Trace:
        async with listening(Lies().app()) as address:
            return await Worker(tiny_model, store, address).play(rollout)

    trace = asyncio.run(main())
    assert trace.error_kind == "wrong_answer" and trace.reward is None
    assert "the logprob of token 0 is 0.5" in trace.error
