"""Rewards by name, their arguments, and the judge's cache."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest
from aiohttp import web

from sightline.envs.rewards import REWARDS, build_reward
from sightline.errors import ConfigError, JudgeFailed
from sightline.media import MediaStore

BUILT = {"judge": {"base_url": "http://127.0.0.1:9/v1", "model": "strict"}}
EXAMPLES = {
    "number": ("5 m", "500 cm"),
    "choice": ("B", "B"),
    "iou": ("[0,0,1,1]", [0, 0, 1, 1]),
    "points": ("(1,1)", [0, 0, 2, 2]),
    "json": ('{"a": 1}', {"a": 1}),
    "json_schema": ("3", {"type": "integer"}),
    "code": ("x = 1", "x=1"),
    "table": ("a,b", "a,b"),
    "math": ("$4$", "4"),
}


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - {"judge", "reward_model"}))
def test_right_answers_earn_one_and_wrong_ones_zero(name: str) -> None:
    reward = build_reward(name, {})
    answer, expected = EXAMPLES.get(name, ("red", "red"))
    assert asyncio.run(reward(answer, expected, {}, None)) == 1
    assert asyncio.run(reward("?", expected, {}, None)) == 0


@pytest.mark.parametrize(
    ("name", "args", "problem", "fix"),
    [
        ("exakt", {}, "reward = 'exakt' is not a built-in reward", "one of exact, fuzzy"),
        ("exact", {"keepcase": 1}, "reward_args does not fit 'exact'", "mean `keep_case`"),
        ("judge", {"model": "m"}, "does not fit 'judge': missing .*'base_url'", "parameters"),
        ("nowhere:score", {}, "no module named 'nowhere'", "folder"),
        ("own_rewards:scor", {}, "has no 'scor'", "'score'"),
    ],
)
def test_wrong_name_or_argument_is_refused(
    name: str, args: dict[str, Any], problem: str, fix: str, own_rewards: None
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        build_reward(name, args)
    assert fix in refused.value.fix


def score(answer: str, expected: str, row: dict[str, Any], bonus: float = 0.0) -> float:
    return float(answer == expected) * row["weight"] + bonus


async def ask(answer: str, expected: str, chat: Any) -> bool:
    await asyncio.sleep(0)
    return bool(chat == answer)


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def __call__(self, answer: str, expected: str) -> int:
        self.count += 1
        return self.count


@pytest.fixture
def own_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_rewards")
    vars(module).update(score=score, ask=ask, Counter=Counter)
    monkeypatch.setitem(__import__("sys").modules, "own_rewards", module)


def test_own_functions_and_classes_receive_what_they_name(own_rewards: None) -> None:
    def earn(name: str, **args: Any) -> float:
        return asyncio.run(build_reward(name, args)("a", "a", {"weight": 0.5}, "a"))

    assert earn("own_rewards:score", bonus=0.25) == 0.75
    assert earn("own_rewards:ask") == 1
    counter = build_reward("own_rewards:Counter", {"start": 3})
    assert [asyncio.run(counter("a", "a", {}, None)) for _ in range(2)] == [4, 5]


def judge_answers(
    questions: list[tuple[str, dict[str, Any]]], store: MediaStore, replies: list[str], **args: Any
) -> tuple[list[Any], list[Any]]:
    """Judge all questions at once, twice. Return the results and the requests' messages."""
    requests: list[Any] = []

    async def serve(http: web.Request) -> web.Response:
        requests.append((await http.json())["messages"])
        text = replies[min(len(requests), len(replies)) - 1]
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    async def main() -> list[Any]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        judge = build_reward("judge", {"base_url": f"{site.name}/v1", "model": "strict", **args})
        try:
            results = []
            for _ in range(2):
                work = [judge(answer, "cat", row, store) for answer, row in questions]
                results += await asyncio.gather(*work, return_exceptions=True)
            return results
        finally:
            await runner.cleanup()

    return asyncio.run(main()), requests


def test_judge_is_asked_once_per_question(store: MediaStore) -> None:
    questions = [("a cat", {}), ("a cat", {}), ("a dog", {})]
    scores, requests = judge_answers(questions, store, ["Score: 1"])
    assert scores == [1] * 6 and len(requests) == 2
    assert "Reference answer: cat" in str(requests[0])


def test_judge_sees_the_images_and_keeps_them_apart(store: MediaStore) -> None:
    from PIL import Image

    refs = [store.put(Image.new("RGB", (32, 32), colour)) for colour in ("red", "blue")]
    questions = [("a cat", {"image": ref, "hint": "{x}"}) for ref in refs]
    scores, requests = judge_answers(
        questions, store, ["Score: 0.5"], images=["image"], question="{hint} {answer}: {expected}?"
    )
    assert scores == [0.5] * 4 and len(requests) == 2
    assert str(requests[0]).count("data:image/png") == 1 and "{x} a cat: cat?" in str(requests[0])


def test_failed_judgement_is_raised_and_asked_again(store: MediaStore) -> None:
    scores, requests = judge_answers([("a", {}), ("a", {})], store, ["no idea", "Score: 1"])
    assert [type(score) for score in scores[:2]] == [JudgeFailed] * 2
    assert scores[2:] == [1, 1] and len(requests) == 2


def test_judge_forgets_the_oldest_scores(store: MediaStore) -> None:
    questions = [("a", {}), ("b", {})]
    _, requests = judge_answers(questions, store, ["Score: 1"], cache_size=1)
    assert len(requests) == 4
