"""Rollouts and the run's control have different rights, with and without TLS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from certificates import write_certificate
from serving import Client, embedded

from sightline.compute.weights import StorePublisher, write_weights
from sightline.errors import EngineError
from sightline.inference.server_spec import ServerSpec
from sightline.inference.weight_fetcher import WeightFetcher
from sightline.rollout.client import GenerateClient
from sightline.wire.generate import AdoptRequest, GenerateRequest, LeaseRequest, SamplingParams
from sightline.wire.weights import Manifest, read_manifest

TOKEN, CONTROL, RUN = "a token of sixteen letters", "another token of sixteen", "a" * 16


def test_rollout_token_may_generate_and_run_token_may_adopt(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)
    manifest, _ = write_weights(tmp_path / "weights", dict(model.named_parameters()), 3, 0, run=RUN)
    cert, key = write_certificate(tmp_path)
    monkeypatch.setenv("T", TOKEN)
    monkeypatch.setenv("C", CONTROL)
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    spec = ServerSpec.of(
        tiny_model, media_roots=[str(tmp_path / "media")], weights_root=tmp_path / "weights",
        token="env:T", control_token="env:C", tls_cert=cert, tls_key=key,
    )  # fmt: skip
    turn = GenerateRequest(token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=1))
    with embedded(spec) as live_client:
        address = f"https://{live_client.host}:{live_client.port}"

        def ask(token: str, what: Callable[[GenerateClient], Coroutine[Any, Any, Any]]) -> Any:
            async def main() -> Any:
                client = GenerateClient(address, token=token)
                try:
                    return await what(client)
                finally:
                    await client.close()

            return asyncio.run(main())

        control: tuple[Callable[[GenerateClient], Coroutine[Any, Any, Any]], ...] = (
            lambda client: client.lease(RUN, 60.0),
            lambda client: client.adopt(str(manifest)),
        )
        for what in control:
            for token, status in ((TOKEN, 403), ("a guess", 401), ("", 401)):
                with pytest.raises(EngineError, match="requires a token|control token") as refused:
                    ask(token, what)
                assert refused.value.status == status
            ask(CONTROL, what)
        assert len(ask(TOKEN, lambda client: client.generate(turn)).choices[0].token_ids) == 1
        for token in (TOKEN, CONTROL):
            assert b"leased_to" in ask(token, lambda client: client.get("/health"))
            assert b"totals" in ask(token, lambda client: client.get("/sightline/v1/stats"))


def test_delayed_weights_are_adopted_while_the_run_holds_the_lease(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)
    path, _ = write_weights(tmp_path / "weights", dict(model.named_parameters()), 3, 0, run=RUN)
    spec = ServerSpec.of(tiny_model, media_roots=[str(tmp_path / "media")])
    blobs = spec.open_blobs()
    moved = StorePublisher(tmp_path, blobs).put(path, read_manifest(path))
    is_fetching, goes_on = threading.Event(), threading.Event()
    fetch = WeightFetcher.fetch

    def fetch_slowly(self: WeightFetcher, manifest: Manifest) -> Path:
        fetched = fetch(self, manifest)
        is_fetching.set()
        assert goes_on.wait(60)
        return fetched

    def lease(client: Client, run: str, seconds: float) -> None:
        body = msgspec.json.encode(LeaseRequest(run, seconds))
        assert client.call("POST", "/sightline/v1/lease", body)[0] == 200

    adopt_body = msgspec.json.encode(AdoptRequest("", moved))
    with embedded(spec) as client:
        lease(client, RUN, 60)
        with monkeypatch.context() as patch:
            patch.setattr(WeightFetcher, "fetch", fetch_slowly)
            fetched: list[Any] = []
            adopting = threading.Thread(
                target=lambda: fetched.append(client.refused(adopt_body, "/sightline/v1/adopt"))
            )
            adopting.start()
            assert is_fetching.wait(60)
            lease(client, RUN, 0)  # as if it had expired
            lease(client, "b" * 16, 60)
            goes_on.set()
            adopting.join(60)
        assert fetched[0].type == "leased" and client.get("/health")["version"] == "0"
        # An unavailable store may return. A missing file does not.
        lease(client, "b" * 16, 0)
        lease(client, RUN, 60)
        part = blobs.path(moved.files[0].parts[0])
        part.rename(part.with_name("kept"))
        part.mkdir()  # nothing is missing, and reading it fails
        error = client.refused(adopt_body, "/sightline/v1/adopt")
        assert (error.code, error.type) == (503, "weights_unavailable"), error
        part.rmdir()
        part.with_name("kept").rename(part)
        assert client.call("POST", "/sightline/v1/adopt", adopt_body)[0] == 200
        assert client.get("/health")["version"] == moved.label
