"""The OpenAI-compatible endpoint of an inference server, called by the official client.

The engine receives the same ids, slots and pixels as from a rollout.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from agents import LOOK, Seen, Worker, picture_url, shown, wire_to
from serving import Client, live
from videos import encode_video, noise_frames

from sightline.envs import Chat
from sightline.families import load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.render import Renderer

MAX_LEN = 4096
IDS = {"return_token_ids": True}
CALLED = {
    "id": "call_a",
    "type": "function",
    "function": {"name": "look", "arguments": '{"x": 1}'},
}


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as live_client:
        yield live_client


@pytest.fixture(scope="module")
def chat(client: Client, tiny_model: Path) -> Iterator[Any]:
    """`chat.completions.create` of the official client, with the served model's name filled in."""
    address = f"http://{client.host}:{client.port}/v1"
    with openai.OpenAI(
        base_url=address, api_key="none", max_retries=0, timeout=300
    ) as openai_client:
        yield lambda **asked: openai_client.chat.completions.create(
            **{"model": tiny_model.name, "max_tokens": 6, "temperature": 0.0, **asked}
        )


@pytest.fixture(scope="module")
def renderer(tiny_model: Path, media: MediaStore) -> Renderer:
    return load_renderer(tiny_model, media)


def tool_picture(number: int) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": picture_url(number, 64, 32)}}
    return {"role": "tool", "tool_call_id": "call_a", "content": [part]}


def film() -> dict[str, Any]:
    """Return a video file, and images with their times."""
    clip = base64.b64encode(encode_video(noise_frames(5))).decode()
    frames = [{"image_url": picture_url(i, 64, 32), "seconds": i} for i in range(3)]
    parts = [
        {"type": "text", "text": "See."},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{clip}"}},
        {"type": "video", "frames": frames},
    ]
    return {"role": "user", "content": parts}


TALKS = {
    "text": ([{"role": "user", "content": "Hello."}], None),
    "picture": ([{"role": "system", "content": "Be brief."}, shown(1)], None),
    "tools": ([shown(2)], [LOOK]),
    "video": ([film()], None),
    "history": (
        [
            shown(3, "First."),
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            tool_picture(4),
            {"role": "assistant", "content": "A tree."},
            shown(5, "And now?"),
        ],
        [LOOK],
    ),
}  # fmt: skip


ON_TORCH = pytest.mark.torch_only("vLLM was not tried with videos")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=ON_TORCH) if n == "video" else n for n in TALKS]
)
def test_engine_receives_the_same_ids_as_from_a_rollout(
    name: str, chat: Any, client: Client, tiny_model: Path, media: MediaStore
) -> None:
    messages, tools = TALKS[name]
    recorder = Seen()

    async def rollout(handle: Chat) -> float:
        await handle.ask(messages, tools=tools)
        return 1.0

    async def main() -> None:
        async with wire_to(f"http://{client.host}:{client.port}", recorder) as address:
            worker = Worker(tiny_model, media, address)
            trace = await worker.play(rollout, temperature=0.0)
            assert not trace.error, trace.error

    asyncio.run(main())
    ((request, response),) = recorder.calls
    answer = chat(messages=messages, tools=tools or openai.omit, extra_body=IDS)
    assert answer.prompt_token_ids == request.token_ids
    assert answer.choices[0].token_ids == response.choices[0].token_ids
    assert answer.usage.prompt_tokens == len(request.token_ids)


def test_images_are_stored_and_passed_by_reference(chat: Any, media: MediaStore) -> None:
    message = shown(11)
    url = message["content"][1]["image_url"]["url"]
    digest = hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest()
    answer = chat(messages=[message], extra_body=IDS)
    assert media.get_ref(digest).digest == digest
    message["content"][1]["image_url"]["url"] = f"media:sha256:{digest}"
    again = chat(messages=[message], extra_body=IDS)
    assert again.prompt_token_ids == answer.prompt_token_ids
    assert again.choices[0].token_ids == answer.choices[0].token_ids


def test_streamed_response_equals_the_unstreamed_one(chat: Any, renderer: Renderer) -> None:
    request = {"messages": [shown(1)], "max_tokens": 40, "extra_body": IDS}
    whole = chat(**request)
    assert whole.choices[0].message.content == renderer.parse(whole.choices[0].token_ids).text
    *deltas, ending, usage = chat(**request, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == whole.choices[0].message.content
    assert {chunk.choices[0].finish_reason for chunk in deltas} == {None}
    assert ending.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert ending.choices[0].token_ids == whole.choices[0].token_ids
    assert not usage.choices and usage.usage.completion_tokens == 40


def test_sampling_parameters_reach_the_engine(chat: Any) -> None:
    request = {"messages": [shown(1)], "temperature": 1.0, "max_tokens": 12, "extra_body": IDS}
    one, same = chat(**request, seed=5), chat(**request, seed=5)
    assert one.choices[0].token_ids == same.choices[0].token_ids
    three = chat(**request, seed=5, n=3)
    drawn = [choice.token_ids for choice in three.choices]
    assert drawn[0] == one.choices[0].token_ids and len(set(map(tuple, drawn))) == 3
    assert three.usage.completion_tokens == sum(map(len, drawn))
    narrow = chat(**{**request, "extra_body": {**IDS, "top_k": 1}}, seed=5)
    greedy = chat(**{**request, "temperature": 0.0})
    assert narrow.choices[0].token_ids == greedy.choices[0].token_ids
    stop = greedy.choices[0].token_ids[2]
    cut = chat(**{**request, "temperature": 0.0, "extra_body": {**IDS, "stop_token_ids": [stop]}})
    first = greedy.choices[0].token_ids.index(stop)
    assert cut.choices[0].token_ids == greedy.choices[0].token_ids[: first + 1]
    assert cut.choices[0].finish_reason == "stop"


def test_response_equals_the_chat_completion(client: Client, chat: Any, tiny_model: Path) -> None:
    url = picture_url(21)
    part = {"type": "image_url", "image_url": {"url": url}}
    completion = chat(messages=[{"role": "user", "content": [part]}], max_tokens=12)
    address = f"http://{client.host}:{client.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as made:
        asked: dict[str, Any] = {
            "model": tiny_model.name,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            "max_output_tokens": 12,
            "temperature": 0.0,
            "top_p": 0.9,
        }
        whole = made.responses.create(**asked)
        with made.responses.stream(**asked) as stream:
            streamed = list(stream)[-1].response
        assert whole.output_text == completion.choices[0].message.content == streamed.output_text
        assert whole.status == streamed.status == "incomplete"
        assert whole.usage.input_tokens == completion.usage.prompt_tokens
        for change, param in (
            ({"previous_response_id": whole.id}, "previous_response_id"),
            ({"temperature": -1.0}, "temperature"),
            ({"max_output_tokens": MAX_LEN}, "input"),
            ({"input": [{"role": "user", "content": [IMAGE]}]}, URL.replace("messages", "input")),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                made.responses.create(**{**asked, **change})
            assert caught.value.param == param


def test_stop_string_ends_an_answer_like_a_stop_token(chat: Any, renderer: Renderer) -> None:
    asked = {"messages": [shown(1)], "max_tokens": 24, "extra_body": IDS, "logprobs": True}
    whole = chat(**asked).choices[0]
    text = renderer.decode(whole.token_ids)
    stop = text[9:11]
    kept = min(k for k in range(25) if stop in renderer.decode(whole.token_ids[:k]))
    assert 0 < kept < 24
    for stops in (stop, ["never said", stop]):
        answer = chat(**asked, stop=stops)
        choice = answer.choices[0]
        assert choice.token_ids == whole.token_ids[:kept] and choice.finish_reason == "stop"
        assert choice.message.content == text[: text.find(stop)]
        assert answer.usage.completion_tokens == kept
        drawn = [entry.logprob for entry in choice.logprobs.content]
        assert drawn == pytest.approx([e.logprob for e in whole.logprobs.content[:kept]], abs=1e-5)
    assert chat(**asked, stop="never said").choices[0].finish_reason == "length"


def test_logprobs_match_the_generate_protocol(
    chat: Any, client: Client, renderer: Renderer
) -> None:
    answer = chat(messages=[{"role": "user", "content": "Hi"}], logprobs=True, extra_body=IDS)
    direct = client.generate(answer.prompt_token_ids).choices[0]
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in direct.logprobs.content][: len(entries)], abs=1e-5
    )
    assert [e.token for e in entries] == [renderer.decode([t]) for t in answer.choices[0].token_ids]


def test_bytes_of_a_token_that_holds_a_part_of_a_character_are_null(chat: Any) -> None:
    asked = {"temperature": 1.0, "seed": 1, "max_tokens": 64, "logprobs": True}
    answer = chat(messages=[{"role": "user", "content": "Hi"}], **asked)
    entries = answer.choices[0].logprobs.content
    assert any("\ufffd" in entry.token for entry in entries)
    for entry in entries:
        spelled = None if "\ufffd" in entry.token else list(entry.token.encode())
        assert entry.bytes == spelled


def test_served_model_is_listed_and_other_models_are_refused(
    chat: Any, client: Client, tiny_model: Path
) -> None:
    (model,) = client.get("/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == (tiny_model.name, MAX_LEN)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(messages=[{"role": "user", "content": "Hi"}], model="another")
    assert (caught.value.param, caught.value.code) == ("model", "model")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
GONE = {"type": "image_url", "image_url": {"url": "media:sha256:" + "0" * 64}}
FAR = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
URL = "messages[0].content[0].image_url.url"
WRONG = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 422, URL),
    ({"messages": [{"role": "user", "content": [GONE]}]}, 404, URL),
    ({"messages": [{"role": "user", "content": [FAR]}]}, 400, URL),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    ({"temperature": -1.0}, 400, "temperature"),
    ({"extra_body": {"min_p": "x"}}, 400, "min_p"),
    ({"extra_body": {"beam": 3}}, 400, "beam"),
    ({"stop": [""]}, 400, "stop[0]"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"n": 65}, 400, "n"),
    ({"tools": [LOOK], "tool_choice": "required"}, 400, "tool_choice"),
    ({"max_tokens": MAX_LEN}, 400, "messages"),
]


@pytest.mark.parametrize(("change", "status", "param"), WRONG)
def test_unsupported_chat_request_is_refused_with_its_param(
    chat: Any, change: dict[str, Any], status: int, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(**{"messages": [{"role": "user", "content": "Hi"}], **change})
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert "file_roots" not in caught.value.message, "which a server does not have"
    assert "http_hosts" not in caught.value.message
    if change.get("max_tokens"):
        assert caught.value.code == "context_length_exceeded"


def test_unknown_urls_and_methods_return_the_standard_error(client: Client) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/completions", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method"),
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "/sightline/v1/adopt", 405, "method"),
    ):
        answer = client.call(method, path)
        error = json.loads(answer[1])["error"]
        is_chat = path.startswith("/v1/")
        assert (answer[0], error["code" if is_chat else "type"]) == (status, kind)
        assert "is not served here" in error["message"] and ("fix" in error) != is_chat


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/sightline/v1/adopt"])
@pytest.mark.parametrize(
    ("header", "value", "status", "code"),
    [
        ("content-type", "text/plain", 415, "content_type"),
        ("host", "pages.example", 421, "host"),
        ("origin", "http://pages.example", 403, "origin"),
    ],
)
def test_request_refused_before_routing_gets_the_error_of_its_path(
    client: Client, path: str, header: str, value: str, status: int, code: str
) -> None:
    headers = {"content-type": "application/json", header: value}
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    connection.request("POST", path, b"{}", headers)
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    is_openai = path.startswith("/v1/")
    assert (answer.status, error["code" if is_openai else "type"]) == (status, code)
    assert ("param" in error) == is_openai == ("fix" not in error)


def test_uncallable_tools_are_not_rendered(chat: Any) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "extra_body": IDS}
    without = chat(**request)
    hidden = chat(**request, tools=[LOOK], tool_choice="none")
    offered = chat(**request, tools=[LOOK])
    assert hidden.prompt_token_ids == without.prompt_token_ids
    assert len(offered.prompt_token_ids) > len(without.prompt_token_ids)
