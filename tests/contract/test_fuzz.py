"""Mutated requests at both endpoints and at `adopt`: a bad request affects only itself.

The quick tests run a sample. `make fuzz` runs 10,000.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import LOOK, picture, shown
from fuzzing import ADOPT, CHAT, GENERATE, Fuzzer
from PIL import Image
from serving import Client, live

from sightline.families import load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaRef, MediaStore
from sightline.message import user
from sightline.render import Renderer
from sightline.wire.generate import GenerateRequest, SamplingParams

NUM_REQUESTS = int(os.environ.get("FUZZ", "600"))


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as live_client:
        yield live_client


def undecodable() -> bytes:
    """Return a PNG with correct checksums and invalid pixel data."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (5, 5, 5)).save(file, "PNG")
    data = bytearray(file.getvalue())
    at = data.index(b"IDAT")
    size = int.from_bytes(data[at - 4 : at], "big")
    data[at + 4 : at + 4 + size] = bytes(size)
    data[at + 4 + size : at + 8 + size] = zlib.crc32(data[at : at + 4 + size]).to_bytes(4, "big")
    return bytes(data)


def bad_media(store: MediaStore) -> list[MediaRef]:
    """Return one of each: missing, other bytes, not an image, unreadable."""
    gone, other, unreadable = (store.put(picture(n)) for n in (901, 902, 903))
    store.path(gone.digest).unlink()
    file = store.path(other.digest)
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    store.path(unreadable.digest).unlink()
    store.path(unreadable.digest).mkdir()
    return [gone, other, store.put(undecodable()), unreadable]


def requests(renderer: Renderer, store: MediaStore) -> list[tuple[str, dict[str, Any]]]:
    good = [store.put(picture(n, 32 * n, 64)) for n in (1, 2)]
    talks = [user("Hi."), user("See:", good[0]), user(*good, "?"), user(good[0], good[0])]
    talks += [user("See:", ref) for ref in bad_media(store)]
    mutated: list[tuple[str, dict[str, Any]]] = []
    for i, message in enumerate(talks):
        rendered = renderer.render([message])
        params = SamplingParams(max_tokens=3, temperature=0.7, seed=i, top_k=5, n=1 + i % 2)
        request = GenerateRequest.of(rendered.token_ids, rendered.slots, params, request_id="f")
        mutated.append((GENERATE, msgspec.json.decode(msgspec.json.encode(request))))
    chat_request = {"messages": [shown(1)], "max_tokens": 3, "tools": [LOOK], "temperature": 1.0}
    mutated += [(CHAT, chat_request), (CHAT, {**chat_request, "stream": True, "n": 2})]
    manifest = broken_weights(store)
    return [
        *mutated,
        *((ADOPT, {"manifest": path}) for path in (manifest, manifest + "\0", "none")),
    ]


def broken_weights(store: MediaStore) -> str:
    """Return the path of an invalid manifest, so that no mutation of it can be adopted."""
    path = store.root / "manifest.json"
    path.write_bytes(b'{"version": 1, "vision_version": 1, "files": [{"name": "\xff"}]}')
    return str(path)


@pytest.mark.timeout(1800)
def test_mutated_requests_do_not_affect_other_requests(
    client: Client, tiny_model: Path, media: MediaStore
) -> None:
    renderer = load_renderer(tiny_model, media)
    witness = renderer.render([user("What is it?", media.put(picture(77)))])
    before = client.generate(witness.token_ids, witness.slots)
    fuzzer = Fuzzer(client.host, client.port, requests(renderer, media))
    fuzzer.run(NUM_REQUESTS)
    print(f"{NUM_REQUESTS} requests: {dict(fuzzer.statuses)} {dict(fuzzer.types)}")
    seconds, number, body = fuzzer.slowest
    print(f"the slowest, number {number}, took {seconds:.1f} s: {body!r}")
    # The mutations pass the first check, and some requests are accepted.
    assert {200, 400, 404, 422, 503} <= fuzzer.statuses.keys()
    wanted = {"schema", "slots", "pads", "sampling", "token_ids", "weights"}
    assert fuzzer.types.keys() >= wanted
    assert client.generate(witness.token_ids, witness.slots).choices == before.choices
    now = client.now()
    assert now["running"] == now["waiting"] == 0
    if client.engine == "torch":
        assert now["rows_free"] + now["rows_cached"] == now["rows"]
