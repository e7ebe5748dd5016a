"""Everything that grows with a request has a limit, which is checked before any work.

The tests count work (characters tokenized, images stored, choices computed), not seconds.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import picture_url
from serving import Client, Together, embedded, live

from sightline import MediaStore, MessageError, user
from sightline.errors import EngineError, PromptTooLong
from sightline.families import load_family, load_renderer
from sightline.families.turn_parsing import MAX_TOOL_DEPTH
from sightline.inference.server_spec import ServerSpec
from sightline.inference.validator import MAX_NAME_CHARS, MAX_STOP_IDS, RequestValidator
from sightline.render import Emitter, Tokenizer
from sightline.wire.codec import MAX_JSON_VALUES
from sightline.wire.generate import SamplingParams
from tests.contract.case import Checkpoint

MAX_LEN = 64
CHAT = "/v1/chat/completions"


class CountingTokenizer(Tokenizer):
    """Counts the characters that are tokenized."""

    num_chars = 0

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        self.num_chars += len(text)
        return super().encode_with_starts(text)


def ask(content: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()


def refuse(client: Client, body: bytes) -> dict[str, Any]:
    status, answer, _ = client.call("POST", CHAT, body)
    error: dict[str, Any] = json.loads(answer)["error"]
    assert status == 400, error
    return error


# --- before tokenizing


def test_too_long_text_is_not_tokenized(tiny_model: Path) -> None:
    tokenizer = CountingTokenizer(tiny_model)
    most = MAX_LEN * tokenizer.max_token_chars
    emitter = Emitter(tokenizer, max_model_len=MAX_LEN)
    emitter.text("a" * most)
    assert emitter.position > MAX_LEN  # it might have fit, so that its tokens are counted
    emitter.text("a")
    with pytest.raises(PromptTooLong, match=f"{most + 1} characters .* max_model_len = {MAX_LEN}"):
        emitter.rendered()
    assert tokenizer.num_chars == most


def test_longest_fitting_text_is_accepted(tiny_model: Path) -> None:
    tokenizer = CountingTokenizer(tiny_model)
    longest = max(tokenizer._plain.get_vocab(), key=len)
    emitter = Emitter(tokenizer, max_model_len=MAX_LEN)
    emitter.text(tokenizer.decode([tokenizer.token_id(longest)]) * MAX_LEN)
    assert emitter.position >= MAX_LEN
    # Four characters that compose into one count as that one.
    emitter = Emitter(tokenizer, max_model_len=MAX_LEN)
    emitter.text("\u03b1\u0313\u0300\u0345" * (MAX_LEN * tokenizer.max_token_chars // 2))
    assert emitter.position


def test_every_chat_format_refuses_too_long_text(checkpoint: Checkpoint) -> None:
    renderer = load_renderer(checkpoint.path, checkpoint.store, max_model_len=MAX_LEN)
    with pytest.raises(PromptTooLong, match="characters"):
        renderer.render([user("word " * 200_000)])
    with pytest.raises(PromptTooLong, match="messages: 65 entries"):
        renderer.render([user("a")] * (MAX_LEN + 1))


def takes_tools(renderer: Any) -> bool:
    return bool(getattr(renderer, "takes_tools", True))


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def test_tools_are_bounded_in_size_and_depth(checkpoint: Checkpoint) -> None:
    renderer = load_renderer(checkpoint.path, checkpoint.store, max_model_len=MAX_LEN)
    if not takes_tools(renderer):
        return
    wide = tool(type="object", properties={f"p{i}": {"type": "string"} for i in range(10_000)})
    with pytest.raises(PromptTooLong, match="tools: .* characters of JSON"):
        renderer.render([user("a")], [wide])
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_TOOL_DEPTH):
        deep = {"type": "array", "items": deep}
    with pytest.raises(MessageError, match=r"tools\[0\]: it is nested deeper than 64 levels"):
        renderer.render([user("a")], [tool(**deep)])


class CountingList(list[str]):
    """Counts how often a search starts at the beginning."""

    num_searches = 0

    def __contains__(self, name: object) -> bool:
        self.num_searches += 1
        return super().__contains__(name)


def test_wide_schema_is_rendered_in_linear_time(checkpoint: Checkpoint) -> None:
    renderer = load_renderer(checkpoint.path, checkpoint.store)
    if not takes_tools(renderer):
        return
    names = CountingList(f"p{i}" for i in range(100))
    properties = {name: {"type": "string"} for name in names}
    renderer.render([user("a")], [tool(type="object", properties=properties, required=names)])
    assert names.num_searches == 0


# --- at a server


@dataclass
class Over:
    """A request that exceeds a limit by one."""

    name: str
    body: Callable[[int], bytes]
    code: str
    told: str


OVER = [
    Over("text", lambda most: ask("x" * 10 * most), "context_length_exceeded", "characters"),
    Over("parts", lambda most: ask(["a"] * (most + 1)), "context_length_exceeded", "parts"),
    Over(
        "messages",
        lambda most: json.dumps({"messages": [{"role": "user"}] * (most + 1)}).encode(),
        "context_length_exceeded",
        "messages",
    ),
    Over(
        "tools",
        lambda most: ask("a", tools=[tool(description="x" * 10 * most)]),
        "context_length_exceeded",
        "tools",
    ),
    Over("n", lambda most: ask("a", n=65), "sampling", "1 to 64"),
    Over(
        "stops",
        lambda most: ask("a", stop_token_ids=[1] * (MAX_STOP_IDS + 1)),
        "sampling",
        "at most 256 ids",
    ),
]


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Any:
    with live(settings) as live_client:
        yield live_client


@pytest.mark.parametrize("over", OVER, ids=lambda over: over.name)
def test_a_chat_request_over_a_limit_is_refused(
    client: Client, settings: ServerSpec, over: Over
) -> None:
    error = refuse(client, over.body(settings.inference.max_model_len))
    assert error["code"] == over.code and over.told in error["message"]


def test_images_over_the_limit_are_not_stored(
    client: Client, settings: ServerSpec, media: MediaStore
) -> None:
    before = sum(1 for _ in media.digests())
    image = {"type": "image_url", "image_url": {"url": picture_url(77_001)}}
    error = refuse(client, ask([image] * (settings.inference.max_model_len + 1)))
    assert error["code"] == "context_length_exceeded"
    assert sum(1 for _ in media.digests()) == before


def test_an_error_does_not_echo_a_long_request(client: Client) -> None:
    body = {"messages": [{"role": "x" * 10**6, "content": "a"}]}
    assert len(refuse(client, json.dumps(body).encode())["message"]) < 3000
    params = {"max_tokens": 1}
    for more in ({"model": "x" * 10**6}, {"x" * 10**6: 1}):
        request = {"token_ids": [5], "sampling_params": params, **more}
        assert len(client.refused(json.dumps(request).encode()).message) < 3000


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"request_id": "x" * (MAX_NAME_CHARS + 1)}, "request_id"),
        (
            {
                "features": {
                    "mm_hashes": {"image": ["a"] * 2},
                    "mm_placeholders": {"image": [{"offset": 0, "length": 1}] * 2},
                    "kwargs_data": {"image": ["a"] * 2},
                }
            },
            "features.kwargs_data",
        ),
    ],
    ids=["request_id", "items"],
)
def test_a_generate_request_over_a_limit_is_refused(
    client: Client, more: dict[str, Any], path: str
) -> None:
    more = msgspec.json.decode(
        msgspec.json.encode(more).replace(b"image", client.modality.encode())
    )
    request = {"token_ids": [5], "sampling_params": {"max_tokens": 1}, **more}
    error = client.refused(json.dumps(request).encode())
    assert error.code == 400 and error.path == path


def test_body_larger_than_any_sequence_is_not_decoded(client: Client, settings: ServerSpec) -> None:
    most = 1024 * settings.inference.max_model_len
    error = client.refused(b" " * (most + 1))
    assert (error.code, error.type) == (413, "too_large") and str(most) in error.message
    # The body is sent in chunks, without a header for its length.
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/inference/v1/generate", iter([b" " * most, b" "]), headers)
    assert connection.getresponse().status == 413
    connection.close()


def test_prompt_and_answer_share_the_length_of_a_sequence(
    client: Client, settings: ServerSpec
) -> None:
    prompt = [5] * (settings.inference.max_model_len - 3)
    assert client.generate(prompt, params=SamplingParams(max_tokens=3)).choices[0].token_ids
    request = {"token_ids": prompt, "sampling_params": {"max_tokens": 4}}
    error = client.refused(json.dumps(request).encode())
    assert (error.code, error.type, error.path) == (400, "too_long", "token_ids")


@pytest.mark.parametrize("piece", [b"[],", b'{"a":1},', b"1000,"], ids=["lists", "dicts", "ids"])
def test_json_with_too_many_values_is_not_decoded(
    client: Client, settings: ServerSpec, piece: bytes
) -> None:
    """The error names the limit, not the decoder's error about a field."""
    most = MAX_JSON_VALUES + settings.inference.max_model_len
    values = b"[" + piece * (1 + most // sum(piece.count(mark) for mark in b",[{")) + b"1]"
    error = refuse(client, b'{"messages": ' + values + b"}")
    assert f"values, and at most {most} are decoded" in error["message"]
    # At a server, the body of such a request exceeds another limit first.
    family = load_family(settings.model.path)
    validator = RequestValidator(family, 0, 512, settings.inference.max_model_len, frozenset())
    with pytest.raises(EngineError, match=f"values, and at most {most} are decoded") as refused:
        validator.check(b'{"token_ids": ' + values + b"}")
    assert refused.value.status == 400 and refused.value.kind == "schema"


@pytest.mark.parametrize(
    "limit", [{"reserve_bytes": 2**62}, {"max_bytes": 10}], ids=["reserve", "size"]
)
def test_chat_images_respect_the_stores_reserve(
    settings: ServerSpec, tmp_path: Path, limit: dict[str, int]
) -> None:
    store = MediaStore(tmp_path / "media", **limit)
    with embedded(settings, store=store) as server:
        image = {"type": "image_url", "image_url": {"url": picture_url(77_002)}}
        status, answer, _ = server.call("POST", CHAT, ask([image], max_tokens=1))
        assert status == 507 and json.loads(answer)["error"]["code"] == "store_full"
        assert not list(store.digests())


# --- between clients


def test_large_requests_do_not_starve_a_small_one(settings: ServerSpec) -> None:
    """Eight calls of 64 choices share two rows. A small call waits for the next row only."""
    params = partial(SamplingParams, temperature=1.0, seed=1)
    with live(settings.replace(max_num_seqs=2)) as server:
        before = server.totals()["finished"]
        together = Together(server)
        large = [together.generate([5, 6], (), params(max_tokens=8, n=8)) for _ in range(8)]
        server.wait_for("totals", "requests", 64)
        server.generate([5, 6], (), params(max_tokens=1))
        # Without fairness, it would be the last of 65.
        assert server.totals()["finished"] - before < 48
        for answer in large:
            assert len(answer.result().choices) == 8
