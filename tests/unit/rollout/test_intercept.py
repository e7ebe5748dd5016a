"""The endpoint of a rollout: keys, recognized history, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from agents import LOOK, Says, Worker, agent, calls, listening, picture, picture_url, shown, spelled
from PIL import Image
from scripted_policy import ScriptedPolicy

from sightline.envs import Chat
from sightline.errors import MediaRefused, MessageError
from sightline.families import load_renderer, registry
from sightline.media import ImageIngestor, MediaStore
from sightline.message import Message, assistant, user
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

ARGUMENTS = '{"x": 1.0, "names": ["é", true]}'


def play(
    model: Path, store: MediaStore, rollout: Any, says: list[Message] | None = None, **more: Any
) -> Trace:
    """Play against a policy that answers with random text, or with the messages in `says`."""

    async def main() -> Trace:
        renderer = load_renderer(model, store)
        policy = Says([spelled(renderer, m) for m in says]) if says else ScriptedPolicy()
        async with listening(policy.app()) as address:
            worker = Worker(model, store, address, max_tokens=2000 if says else 6)
            return await worker.play(rollout, **more)

    return asyncio.run(main())


# --- recognized history


def dropped_reasoning(message: dict[str, Any]) -> None:
    message.pop("reasoning_content", None)


def null_content(message: dict[str, Any]) -> None:
    message["content"] = None


def written_by_javascript(message: dict[str, Any]) -> None:
    message["tool_calls"][0]["function"]["arguments"] = '{"names":["\\u00e9",true],"x":1}'


def other_ids(message: dict[str, Any]) -> None:
    message["tool_calls"][0]["id"] = "mine"


def all_at_once(message: dict[str, Any]) -> None:
    for change in (dropped_reasoning, null_content, written_by_javascript, other_ids):
        change(message)


def unchanged(message: dict[str, Any]) -> None:
    pass


def other_value(message: dict[str, Any]) -> None:
    message["tool_calls"][0]["function"]["arguments"] = '{"x": 1.5, "names": ["é", true]}'


def sent_back(
    model: Path,
    store: MediaStore,
    change: Callable[[dict[str, Any]], None],
    reasons: bool = True,
) -> Trace:
    """An agent that calls a tool twice, and changes its copy of the first answer."""
    says = [
        calls(ARGUMENTS, '{"x": 2}', content="Hm.", reasoning="I think." if reasons else None),
        calls('{"x": 3}', reasoning="Again." if reasons else None),
        assistant("Done."),
    ]

    async def rollout(chat: Chat) -> float:
        history: list[Any] = [{"role": "user", "content": "go"}]
        async with agent(chat) as client:
            for turn in range(3):
                answer = await client.chat.completions.create(
                    model="m", messages=history, tools=[LOOK]
                )
                choice = answer.choices[0]
                assert choice.finish_reason == ("tool_calls" if turn < 2 else "stop")
                message = choice.message.model_dump(exclude_none=True)
                assert message.get("reasoning_content") == says[turn].reasoning
                if turn == 0:
                    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
                    change(message)
                history.append(message)
                for call in message.get("tool_calls", ()):
                    part = {"type": "image_url", "image_url": {"url": picture_url(turn)}}
                    history.append({"role": "tool", "tool_call_id": call["id"], "content": [part]})
        return 1.0

    trace = play(model, store, rollout, says)
    assert not trace.error, trace.error
    return trace


@pytest.mark.parametrize(
    ("family", "options", "reasons"),
    [
        pytest.param("qwen_vl", {"type": "qwen3_vl"}, False, id="qwen3_vl"),
        pytest.param("qwen_vl", {"type": "qwen3_5"}, True, id="qwen3_5"),
        # It assigns its own call ids, and its template writes them.
        pytest.param("kimi_k25", {}, False, id="kimi_k25"),
        # A turn ends with the token that opens the next turn.
        pytest.param("glm_v", {}, False, id="glm_v"),
    ],
)
def test_other_chat_formats_also_recognize_their_turns(
    tmp_path: Path, store: MediaStore, family: str, options: Any, reasons: bool
) -> None:
    model = tmp_path / "model"
    registry.write_tiny(family, model, seed=0, **options)
    for change in (unchanged, null_content, all_at_once):
        trace = sent_back(model, store, change, reasons)
        assert trace.forks == {} and len(trace.branches()) == 1, change.__name__
    assert sent_back(model, store, other_value, reasons).forks == {"diverged": 1}


# --- keys


def test_a_url_keeps_its_first_image(tiny_model: Path, store: MediaStore, tmp_path: Path) -> None:
    """An agent sends its history again after the file has changed."""
    file = tmp_path / "screen.png"
    resolver = ImageIngestor(store, file_roots=[tmp_path])

    async def rollout(chat: Chat) -> float:
        part = {"type": "image_url", "image_url": {"url": f"file://{file}"}}
        history: list[Any] = [{"role": "user", "content": [part]}]
        async with agent(chat) as client:
            for color in ("red", "blue"):
                Image.new("RGB", (64, 64), color).save(file)
                answer = await client.chat.completions.create(model="m", messages=history)
                message = answer.choices[0].message.model_dump(exclude_none=True)
                history += [message, {"role": "user", "content": "go on"}]
        return 1.0

    async def main() -> Trace:
        renderer = load_renderer(tiny_model, store)
        policy = Says([spelled(renderer, assistant(word)) for word in ("one", "two")])
        async with listening(policy.app()) as address:
            worker = Worker(tiny_model, store, address, max_tokens=2000, resolver=resolver)
            return await worker.play(rollout)

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    assert len(trace.turns) == 2 and trace.forks == {} and trace.num_images_shown == 1


def test_two_keys_do_not_see_each_others_trace(tiny_model: Path, store: MediaStore) -> None:
    async def main() -> None:
        meeting = asyncio.Barrier(2)
        keys, ports = set[tuple[str, str]](), set[str]()

        async def rollout(chat: Chat) -> float:
            name = f"I am {chat.rng.random()}."
            keys.add((name, chat.api_key))
            ports.add(chat.base_url)
            history: list[Any] = [{"role": "user", "content": name}]
            async with agent(chat) as client:
                for _ in range(3):
                    await meeting.wait()
                    answer = await client.chat.completions.create(model="m", messages=history)
                    message = answer.choices[0].message.model_dump(exclude_none=True)
                    history += [message, {"role": "user", "content": name}]
            return 1.0

        async with listening(ScriptedPolicy().app()) as address:
            with Worker(tiny_model, store, address).player(rollout) as player:
                both = await asyncio.gather(
                    *(
                        player.play(RolloutRequest(f"r{i}", "g", 0, "train", i, 1.0))
                        for i in range(2)
                    )
                )
                await player.close()
        traces = [played.trace for played in both]
        assert len({key for _, key in keys}) == 2
        assert len(ports) == 1, "one port a worker"
        for trace in traces:
            assert not trace.error and trace.forks == {}
            assert len(trace.turns) == 3 and len(trace.branches()) == 1
            assert len({n.message.text for n in trace.nodes if n.message.role == "user"}) == 1
        assert {t.nodes[0].message.text for t in traces} == {name for name, _ in keys}

    asyncio.run(main())


def test_unknown_key_or_content_type_is_rejected(tiny_model: Path, store: MediaStore) -> None:
    async def rollout(chat: Chat) -> float:
        for key in ("", "sk-wrong", chat.api_key + "x", chat.api_key[:-1]):
            for headers in ({"authorization": f"Bearer {key}"}, {"authorization": key}, {}):
                async with (
                    aiohttp.ClientSession(headers=headers) as session,
                    session.post(chat.base_url + "/chat/completions", json={}) as answer,
                ):
                    assert answer.status == 401
                    error = (await answer.json())["error"]
                    assert error["code"] == "invalid_api_key" and "api_key" in error["message"]
        own = {"authorization": f"Bearer {chat.api_key}"}
        async with (
            aiohttp.ClientSession(headers=own) as session,
            session.post(chat.base_url + "/chat/completions", data="text") as answer,
        ):
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["param"]) == (415, "content_type", None)
        client = openai.AsyncOpenAI(base_url=chat.base_url, api_key="sk-other")
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=[shown(0)])
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        await client.close()
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert not trace.error and not trace.nodes
    assert not trace.refused_requests, "a stranger's request is nothing that the rollout did"


def test_request_outliving_its_rollout_is_cancelled_without_a_trace(
    tiny_model: Path, store: MediaStore
) -> None:
    async def main() -> None:
        arrived, late = asyncio.Event(), list[Any]()

        async def stuck(http: Any) -> Any:
            arrived.set()
            await asyncio.Event().wait()

        async def rollout(chat: Chat) -> float:
            client = openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key)
            request = client.chat.completions.create(model="m", messages=[shown(0)])
            late.append((client, asyncio.ensure_future(request)))
            await arrived.wait()
            return 1.0

        app = aiohttp.web.Application()
        app.router.add_post("/inference/v1/generate", stuck)
        async with listening(app) as address:
            with Worker(tiny_model, store, address).player(rollout) as player:
                played = await player.play(RolloutRequest("r", "g", 0, "train", 1, 1.0))
                ((client, request),) = late
                with pytest.raises(openai.AuthenticationError) as caught:
                    await request
                assert caught.value.code == "rollout_over"
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="m", messages=[shown(0)])
                await client.close()
                await player.close()
        trace = played.trace
        assert trace.reward == 1.0 and not trace.nodes

    asyncio.run(main())


def test_request_of_a_disconnected_agent_is_cancelled_without_a_trace(
    tiny_model: Path, store: MediaStore
) -> None:
    class Late(ScriptedPolicy):
        """Answers from the second request on."""

        def __init__(self) -> None:
            super().__init__()
            self.arrived, self.given_up = asyncio.Event(), asyncio.Event()

        async def _generate(self, http: Any) -> Any:
            if self.arrived.is_set():
                return await super()._generate(http)
            self.arrived.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()

    async def main() -> Trace:
        policy = Late()

        async def rollout(chat: Chat) -> float:
            async with agent(chat) as client:
                request = client.chat.completions.create(model="m", messages=[shown(0)])
                asking = asyncio.ensure_future(request)
                await policy.arrived.wait()
                asking.cancel()
                await policy.given_up.wait()
                await client.chat.completions.create(model="m", messages=[shown(0)])
            return 1.0

        async with listening(policy.app()) as address:
            return await Worker(tiny_model, store, address).play(rollout)

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    assert len(trace.turns) == 1 and trace.forks == {} and not trace.refused_requests


# --- refusals

BAD_URL = "data:image/png;base64,aGVsbG8="


def with_part(**part: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a"}, part]}


BAD_PARTS = [
    ({"type": "image_url", "image_url": {"url": BAD_URL}}, ".image_url.url", 422),
    ({"type": "image_url", "image_url": BAD_URL}, ".image_url", 422),
    ({"type": "image", "image": "file:///etc/passwd"}, ".image", 422),
    ({"type": "input_image", "image_url": "http://169.254.169.254/a.png"}, ".image_url", 422),
    (
        {"type": "image_url", "image_url": {"url": "media:sha256:" + "0" * 64}},
        ".image_url.url",
        404,
    ),
    ({"type": "image_url", "image_url": None}, ".image_url", 400),
    ({"type": "image", "ref": {"digest": "0" * 64}}, ".ref.url", 400),
    ({"type": "input_audio", "input_audio": {}}, ".type", 400),
    ({"type": "video_url", "video_url": {}}, ".video_url.url", 400),
    ({"type": "file", "file": {}}, ".type", 400),
    ({"type": "unheard_of"}, ".type", 400),
    ({"text": "a"}, ".type", 400),
    (3, "", 400),
]


def test_refused_part_is_named_by_path_and_recorded_in_the_trace(
    tiny_model: Path, store: MediaStore
) -> None:
    params: list[str] = []

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            for part, where, status in BAD_PARTS:
                message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(model="m", messages=[shown(0), message])
                params.append(f"messages[1].content[1]{where}")
                refusal = (caught.value.status_code, caught.value.param)
                assert refusal == (status, params[-1])
                assert caught.value.type == "invalid_request_error"
                assert caught.value.code and "fix: " in caught.value.body["message"]
            # The role is checked before the image.
            content = [{"type": "image_url", "image_url": {"url": BAD_URL}}]
            answer = {"role": "assistant", "content": content}
            with pytest.raises(openai.BadRequestError, match=r"in a message of role 'assistant'"):
                await client.chat.completions.create(model="m", messages=[shown(0), answer])
            params.append("messages[1].content[0].image_url.url")
            # A refusal has no cost: the agent may continue.
            await client.chat.completions.create(model="m", messages=[shown(0)])
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert not trace.error, trace.error
    assert len(trace.turns) == 1 and trace.forks == {}
    assert len(trace.refused_requests) == len(params)
    assert all(
        param in recorded for param, recorded in zip(params, trace.refused_requests, strict=True)
    )


BAD_FIELDS = [
    ("n", 0), ("n", True), ("stop", ""), ("stop", ["x"] * 17), ("logit_bias", {"3": 1}),
    ("response_format", {"type": "json_object"}), ("tool_choice", "required"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ("tool_choice", {"type": "function", "function": {"name": "look"}}),
    ("presence_penalty", 0.5), ("frequency_penalty", -1), ("modalities", ["audio"]),
    ("max_tokens", 0), ("max_completion_tokens", -1), ("max_tokens", "many"), ("unheard_of", 1),
    ("stream_options", 3), ("stream", "yes"), ("tools", {}), ("model", 3), ("logprobs", True),
    ("top_logprobs", 2), ("functions", [{}]), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1),
    ("stop_token_ids", [3]), ("audio", {}), ("web_search_options", {}), ("function_call", "go"),
]  # fmt: skip


def test_unsupported_field_is_refused_by_name(tiny_model: Path, store: MediaStore) -> None:
    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            for field, value in BAD_FIELDS:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(
                        model="m", messages=[shown(0)], extra_body={field: value}
                    )
                assert caught.value.param == field
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert not trace.error, trace.error
    assert len(trace.refused_requests) == len(BAD_FIELDS) and not trace.nodes


def test_rollout_sampling_settings_take_precedence(tiny_model: Path, store: MediaStore) -> None:
    requests: list[Any] = []

    class Watching(ScriptedPolicy):
        def answer(self, request: Any, digests: Any) -> Any:
            requests.append(request.sampling_params)
            return super().answer(request, digests)

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            await client.chat.completions.create(
                model="gpt-x",
                messages=[shown(0)],
                temperature=0.1,
                top_p=1,
                seed=7,
                max_tokens=1000,
                n=1,
                tool_choice="none",
                parallel_tool_calls=False,
                presence_penalty=0,
                response_format={"type": "text"},
                stop=None,
                store=True,
                service_tier="flex",
                metadata={"a": "b"},
                safety_identifier="s",
                prompt_cache_key="k",
                user="me",
                extra_body={"top_k": -1, "min_p": 0.0},
            )
            await client.chat.completions.create(
                model="gpt-x", messages=[shown(1)], max_completion_tokens=2, temperature=0
            )
        return 1.0

    async def main() -> Trace:
        async with listening(Watching().app()) as address:
            return await Worker(tiny_model, store, address).play(rollout)

    trace = asyncio.run(main())
    assert not trace.error, trace.error
    assert [(p.temperature, p.top_p, p.top_k, p.min_p) for p in requests] == [
        (1.0, 1.0, 0, 0.0)
    ] * 2
    assert [p.max_tokens for p in requests] == [6, 2]
    assert len({p.seed for p in requests} - {7}) == 2


def test_messages_added_by_the_environment_pass_the_same_checks(
    tiny_model: Path, store: MediaStore
) -> None:
    bad = with_part(type="image_url", image_url={"url": BAD_URL})
    unknown = with_part(type="file", file={"url": BAD_URL})

    async def rollout(chat: Chat) -> float:
        history: list[Any] = [shown(0)]
        async with agent(chat) as client:
            answer = await client.chat.completions.create(model="m", messages=history)
        history.append(answer.choices[0].message.model_dump(exclude_none=True))
        for message, error in ((bad, MediaRefused), (unknown, MessageError)):
            with pytest.raises(error, match=r"^messages\[0\]\.content\[1\]"):
                await chat.send([message])
            with pytest.raises(error, match=r"^messages\[2\]\.content\[1\]"):
                await chat.ask([*history, message])
        await chat.send([user("Go on.")])
        return 1.0

    trace = play(tiny_model, store, rollout)
    assert not trace.error, trace.error
    assert len(trace.refused_requests) == 4 and len(trace.turns) == 2 and trace.forks == {}


# --- failures behind the endpoint


def test_changed_pixels_drop_the_rollout_even_if_the_agent_continues(
    tiny_model: Path, store: MediaStore
) -> None:
    class Blind(ScriptedPolicy):
        """Makes other pixels of the same image at the second turn."""

        turn = 0

        def answer(self, request: Any, digests: Any) -> Any:
            self.turn += 1
            return super().answer(request, [f"{self.turn:032x}"] * len(digests))

    async def rollout(chat: Chat) -> float:
        async with agent(chat) as client:
            history: list[Any] = [shown(0)]
            answer = await client.chat.completions.create(model="m", messages=history)
            history += [answer.choices[0].message.model_dump(exclude_none=True), shown(1)]
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=history)
        return 1.0

    async def main() -> Trace:
        async with listening(Blind().app()) as address:
            return await Worker(tiny_model, store, address).play(rollout)

    trace = asyncio.run(main())
    assert trace.error_kind == "PixelMismatch" and trace.reward is None
    assert len(trace.turns) == 1


def test_unavailable_server_is_a_retryable_503(tiny_model: Path, store: MediaStore) -> None:
    async def rollout(chat: Chat) -> float:
        client = openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=[shown(0)])
        await client.close()
        assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
        return 1.0

    trace = asyncio.run(Worker(tiny_model, store, "http://127.0.0.1:1").play(rollout))
    assert trace.reward == 1.0 and len(trace.refused_requests) == 1


def test_swapped_images_replace_the_agents_images(tiny_model: Path, store: MediaStore) -> None:
    donors = tuple(store.put(picture(900 + i, 64, 32)) for i in range(2))

    async def rollout(chat: Chat) -> float:
        history: list[Any] = []
        async with agent(chat) as client:
            for turn in range(3):
                history.append(shown(turn))
                answer = await client.chat.completions.create(model="m", messages=history)
                history.append(answer.choices[0].message.model_dump(exclude_none=True))
        return 1.0

    trace = play(tiny_model, store, rollout, exchanged=donors)
    assert not trace.error, trace.error
    refs = [slot.item.ref for node in trace.nodes for slot in node.slots]
    assert refs == [donors[0], donors[1], donors[0]] and trace.forks == {}


def test_branches_share_the_order_of_the_swapped_images(
    tiny_model: Path, store: MediaStore
) -> None:
    donors = tuple(store.put(picture(900 + i, 64, 32)) for i in range(3))

    async def rollout(chat: Chat) -> float:
        side = chat.branch()
        refs = [branch.put(picture(i)) for i, branch in enumerate((chat, side, chat.branch()))]
        assert refs == list(donors) and chat.put(picture(3)) == donors[0]
        await side.send([user(refs[1])])
        return 1.0

    trace = play(tiny_model, store, rollout, exchanged=donors)
    assert not trace.error, trace.error


# --- with other features
