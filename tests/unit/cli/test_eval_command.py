"""`sightline eval`: an environment against an endpoint and against a checkpoint."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import listening
from aiohttp import web
from serving import Client, live, serve_here

from sightline.cli.main import main
from sightline.envs.openai_endpoint import OpenAIClient
from sightline.errors import EngineError
from sightline.inference.server_spec import ServerSpec
from sightline.launch import evaluate
from sightline.media import MediaStore

WORDS = ["eval", "color_codeword", "--tasks", "6", "--max-tokens", "12", "--temperature", "0"]


@pytest.fixture
def server(tiny_model: Path, store: MediaStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=tiny_model, media_roots=(store.root,), device="cpu", max_model_len=1024
    )
    with live(settings) as client:
        yield client


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_endpoint_accepts_data_urls_and_references(
    server: Client, store: MediaStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ["--endpoint", f"http://{server.host}:{server.port}/v1"]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    assert main([*WORDS, *endpoint, "--output", str(one)]) == 0
    output = capsys.readouterr().out
    assert "95% interval" in output and "reward" in output and "0 broken" in output
    endpoint[1] = endpoint[1].removesuffix("/v1")  # which is understood
    assert main([*WORDS, *endpoint, "--media", str(store.root), "--output", str(other)]) == 0
    assert lines(one) == lines(other) and len(lines(one)) == 6
    assert all(line["num_tokens"] for line in lines(one))


def test_eval_serves_a_checkpoint_while_it_runs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "temporary_server", serve_here)
    assert main([*WORDS, "--checkpoint", str(tiny_model), "--device", "cpu"]) == 0
    assert "6 held-out tasks" in capsys.readouterr().out


def test_broken_rollouts_are_counted_and_shown(
    server: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"http://{server.host}:{server.port}/v1"
    assert main([*WORDS, "--endpoint", endpoint, "--model", "another"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "6 broken" in output and "is not served here" in output
    assert main([*WORDS, "--endpoint", f"{endpoint}/chat"]) == 2
    assert "answered 404" in (output := capsys.readouterr().err) and "it ends in /v1" in output


@pytest.fixture
def nobody() -> Iterator[str]:
    """Return the address of an endpoint that never answers."""
    with socket.socket() as bound:  # and never listened on
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1"


@pytest.mark.parametrize("model", ["", "any"])
def test_unreachable_address_is_reported_before_the_first_task(model: str, nobody: str) -> None:
    async def choose() -> None:
        client = OpenAIClient(nobody, model)
        try:
            await client.choose_model(timeout_s=0.5)
        finally:
            await client.close()

    with pytest.raises(EngineError, match=nobody) as caught:
        asyncio.run(choose())
    assert "check the address" in caught.value.fix


def test_url_that_is_no_endpoint_is_not_retried() -> None:
    async def page(http: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def choose() -> OpenAIClient:
        app = web.Application()
        app.router.add_get("/{path:.*}", page)
        async with listening(app) as address:
            client = OpenAIClient(f"{address}/v1", "")
            with pytest.raises(EngineError, match="not answer as an OpenAI endpoint"):
                await client.choose_model()
            await client.close()
        return client

    # One request waits for an answer, and one reads the models.
    assert asyncio.run(choose()).num_requests == 2
