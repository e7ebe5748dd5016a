"""The documented environments run as written."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
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

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "environments.md"


def read_blocks(page: Path) -> list[str]:
    return [textwrap.dedent(b) for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]


async def my_agent(client: Any, task: str) -> int:
    """The agent that docs/agent_endpoint.md does not define."""
    messages = [{"role": "user", "content": task}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    return len(answer.choices[0].message.content)


def environment(number: int, *args: Any, page: Path = PAGE) -> Environment:
    names: dict[str, Any] = {"__name__": "docs", "my_agent": my_agent}
    exec(compile(read_blocks(page)[number], f"{page.name}:{number}", "exec"), names)
    (classes,) = [
        value for value in names.values()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    ]  # fmt: skip
    return classes(*args)  # type: ignore[no-any-return]


def play(env: Environment, model: Path, store: MediaStore) -> Trace:
    async def main() -> Trace:
        async with playing(env, load_renderer(model, store), store) as player:
            trace = (await player.play(RolloutRequest("r", "g", 3, "train", 1, 1.0))).trace
            await player.close()
            return trace

    return asyncio.run(main())


@pytest.mark.parametrize(
    "page, number, turns",
    [
        ("docs/environments.md", 0, 1),
        ("docs/environments.md", 1, 1),
        ("docs/agent_endpoint.md", 0, 1),
        ("docs/your_task.md", 0, 1),
        ("docs/your_agent.md", 0, 3),
        ("README.md", 0, 1),
    ],
)
def test_documented_environments_run(
    page: str, number: int, turns: int, tiny_model: Path, store: MediaStore
) -> None:
    trace = play(environment(number, page=ROOT / page), tiny_model, store)
    assert not trace.error and trace.reward in (0.0, 1.0) and len(trace.turns) == turns


def test_unresponsive_judge_breaks_the_rollout(
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
