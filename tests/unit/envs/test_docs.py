"""The environments of docs/environments.md are played as they stand there."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from unit.rollout.test_many import playing

from sightline.envs import Environment
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def environment(number: int, *args: Any) -> Environment:
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(BLOCKS[number], f"{PAGE.name}:{number}", "exec"), names)
    (made,) = [
        value for value in names.values()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    ]  # fmt: skip
    return made(*args)  # type: ignore[no-any-return]


def play(env: Environment, model: Path, store: MediaStore) -> Trace:
    async def main() -> Trace:
        async with playing(env, load_renderer(model, store), store) as player:
            return (await player.play(RolloutRequest("r", "g", 3, "train", 1, 1.0))).trace

    return asyncio.run(main())


@pytest.mark.parametrize("number", [0, 1])
def test_the_environments_of_the_docs_play(
    number: int, tiny_model: Path, store: MediaStore
) -> None:
    trace = play(environment(number), tiny_model, store)
    assert not trace.error and trace.reward in (0.0, 1.0) and len(trace.turns) == 1


def test_the_first_environment_is_about_25_lines() -> None:
    body = BLOCKS[0].partition("class ")[2].strip().splitlines()
    assert len(body) <= 20 and len(BLOCKS[0].strip().splitlines()) <= 28


def test_a_judge_that_does_not_answer_costs_the_rollout(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    rows = [{"question": "what is it?", "image": "a.png"}] * 10
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = environment(2, str(tmp_path / "t.jsonl"), "http://127.0.0.1:9/v1", "judge")
    env.judge = type(env.judge)("http://127.0.0.1:9/v1", "judge", tries=1)  # type: ignore
    trace = play(env, tiny_model, store)
    assert trace.error_kind == "JudgeFailed" and trace.reward is None
    assert len(trace.turns) == 1 and trace.num_images_shown == 1
