"""Thousands of mutated requests, at both endpoints and the one for weights: each costs itself only.

A sample runs with the quick tests; `make fuzz` runs 10,000.
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
    with live(settings) as made:
        yield made


def undecodable() -> bytes:
    """A PNG whose checksums are right and whose pixels are no data."""
    made = io.BytesIO()
    Image.new("RGB", (32, 32), (5, 5, 5)).save(made, "PNG")
    data = bytearray(made.getvalue())
    at = data.index(b"IDAT")
    size = int.from_bytes(data[at - 4 : at], "big")
    data[at + 4 : at + 4 + size] = bytes(size)
    data[at + 4 + size : at + 8 + size] = zlib.crc32(data[at : at + 4 + size]).to_bytes(4, "big")
    return bytes(data)


def bad_media(store: MediaStore) -> list[MediaRef]:
    """One of each: gone, other bytes, no picture, unreadable."""
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
    found: list[tuple[str, dict[str, Any]]] = []
    for i, message in enumerate(talks):
        rendered = renderer.render([message])
        params = SamplingParams(max_tokens=3, temperature=0.7, seed=i, top_k=5, n=1 + i % 2)
        request = GenerateRequest.of(rendered.token_ids, rendered.slots, params, request_id="f")
        found.append((GENERATE, msgspec.json.decode(msgspec.json.encode(request))))
    asked = {"messages": [shown(1)], "max_tokens": 3, "tools": [LOOK], "temperature": 1.0}
    found += [(CHAT, asked), (CHAT, {**asked, "stream": True, "n": 2})]
    manifest = broken_weights(store)
    return [*found, *((ADOPT, {"manifest": path}) for path in (manifest, manifest + "\0", "none"))]


def broken_weights(store: MediaStore) -> str:
    """The path of a manifest that is none: whatever a mutation leaves of it, nothing is adopted."""
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
    # The mutations reach past the first check, and both ways of ending.
    assert {200, 400, 404, 422, 503} <= fuzzer.statuses.keys()
    wanted = {"schema", "slots", "pads", "sampling", "token_ids", "weights"}
    assert fuzzer.types.keys() >= wanted
    assert client.generate(witness.token_ids, witness.slots).choices == before.choices
    now = client.now()
    assert now["running"] == now["waiting"] == 0
    if client.engine == "torch":
        assert now["rows_free"] + now["rows_cached"] == now["rows"]
