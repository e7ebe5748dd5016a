"""Mutated requests for an inference server, from requests that it answers.

The server must answer each or refuse it with a documented error, and then work as before.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import string
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sightline.inference.errors import STATUS_BY_TYPE
from sightline.wire.generate import ErrorAnswer, GenerateResponse
from sightline.wire.item import RAW_PREFIX

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
ADOPT = "/sightline/v1/adopt"
LITERALS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 63, 64, 65, 255, 10**6, 2**31, 2**32, 2**63, 2**64, 2**80,
    -(2**63), 0.0, -0.0, 0.5, -0.5, 1e-3, 1e-40, 1e-300, 1e38, 1e39, 1e300, "", "x", "image",
    "\u0000", "é\U0001f600", "9" * 400, "mmraw:", "mmraw:{}", "media:sha256:" + "0" * 64,
    "data:image/png;base64,aGVsbG8=", "file:///etc/hostname", [], [None], [[]], [0], [-1],
    [1, 2, 3], {}, {"x": 1}, {"image": []}, {"image": None},
)  # fmt: skip
WORDS = (
    "token_ids", "sampling_params", "features", "request_id", "model", "max_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "stop_token_ids", "logprobs", "n",
    "prompt_logprobs", "detokenize", "skip_reading_prefix_cache", "mm_hashes", "mm_placeholders",
    "kwargs_data", "offset", "length", "pixels", "messages", "tools", "stream", "stop",
)  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """Return the same JSON with one change at any depth, inside items too."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.05:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.1:
            return {**value, rng.choice(WORDS): rng.choice(LITERALS)}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[: at + 1] + value[at:]
            case 2:
                return rng.sample(value, len(value))
            case 3:
                return value * rng.choice([2, 50])
            case _:
                return [*value[:at], mutate(value[at], rng), *value[at + 1 :]]
    if isinstance(value, str) and value.startswith(RAW_PREFIX + "{") and rng.random() < 0.7:
        with contextlib.suppress(ValueError):  # an item that an earlier mutation has broken
            return RAW_PREFIX + json.dumps(mutate(json.loads(value[len(RAW_PREFIX) :]), rng))
    if isinstance(value, str) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(string.printable) + value[at + 1 :]
    if isinstance(value, (int, float)) and rng.random() < 0.6:
        return value + rng.choice([-2, -1, 1, 2, 0.5, 1000])
    return rng.choice(LITERALS)


def broken(body: bytes, rng: random.Random) -> bytes:
    """Damage the bytes so that they are rarely valid JSON."""
    at = rng.randrange(len(body))
    match rng.randrange(6):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + rng.randbytes(rng.randrange(1, 9)) + body[at:]
        case 2:
            return body[:at] + bytes([body[at] ^ (1 << rng.randrange(8))]) + body[at + 1 :]
        case 3:
            return body + body
        case 4:
            return b"[" * rng.choice([10, 5000]) + body
        case _:
            return rng.randbytes(rng.randrange(40))


@dataclass
class Fuzzer:
    """`requests` are paths and bodies. Some may name media that is missing, broken or unreadable,
    and are refused as they are."""

    host: str
    port: int
    requests: Sequence[tuple[str, dict[str, Any]]]
    seed: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int, bytes] = (0.0, 0, b"")
    """Seconds, number and begin of the request that took longest."""

    def run(self, num_requests: int) -> None:
        rng = random.Random(self.seed)
        for number in range(num_requests):
            path, body = rng.choice(self.requests)
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                changed = mutate(body, rng)
                body = changed if isinstance(changed, dict) else body
            data = json.dumps(_capped(body)).encode()
            if rng.random() < 0.1:
                data = broken(data, rng)
            began = time.monotonic()
            self._send(path, data, number)
            self.slowest = max(self.slowest, (time.monotonic() - began, number, data[:500]))

    def _send(self, path: str, body: bytes, number: int) -> None:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=300)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        except OSError as error:
            raise AssertionError((number, path, body[:2000], error)) from error
        finally:
            connection.close()
        self.statuses[answer.status] += 1
        note = (number, body[:2000], answer.status, data[:500])
        assert answer.status < 500 or answer.status == 503, note
        if answer.status == 200:
            if path == GENERATE:
                msgspec.json.decode(data, type=GenerateResponse)
            return
        if path == CHAT:
            self.types[json.loads(data)["error"]["code"]] += 1
            return
        error = msgspec.json.decode(data, type=ErrorAnswer).error
        self.types[error.type] += 1
        assert STATUS_BY_TYPE[error.type] == error.code == answer.status and error.fix, note
        assert ("retry-after" in answer.headers) == (answer.status == 503), note


def _capped(body: dict[str, Any]) -> dict[str, Any]:
    """Long answers take time and find no bugs."""
    params = body.get("sampling_params")
    if isinstance(params, dict) and 32 < _int(params.get("max_tokens")) < 100_000:
        return {**body, "sampling_params": {**params, "max_tokens": 32}}
    if "messages" in body and not 0 < _int(body.get("max_tokens")) <= 32:
        return {**body, "max_tokens": 4}
    return body


def _int(value: Any) -> int:
    return value if type(value) is int else 0
