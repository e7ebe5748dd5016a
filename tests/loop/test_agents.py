"""A whole job whose rollouts are played by an agent that only knows the OpenAI SDK."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.jobs import sightline, summary
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

ENVIRONMENT = """
import base64, io
from openai import AsyncOpenAI
from PIL import Image
from sightline.envs import Environment, Task


def url(shade):
    file = io.BytesIO()
    Image.new("L", (32, 32), shade % 256).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class Agent(Environment):
    name = "agent"

    def task(self, index, split):
        return Task(index, split, data=7 * index + len(split))

    async def rollout(self, task, chat):
        history, length = [], 0
        async with AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
            for turn in range(3):
                part = {"type": "image_url", "image_url": {"url": url(task.data + turn)}}
                history.append({"role": "user", "content": [part]})
                answer = await client.chat.completions.create(model="m", messages=history)
                said = answer.choices[0].message.model_dump(exclude_none=True)
                length += answer.usage.completion_tokens
                history.append(said)
            history[1]["content"] += "!"    # an edit: the last answer is given to other words
            await client.chat.completions.create(model="m", messages=history[:-1])
        return length / 30
"""
RUN = """
[run]
name = "agents"
steps = 2
[model]
path = "models/tiny"
[env]
name = "agent_env:Agent"
[rollout]
max_tokens = 8
[eval]
tasks = 4
[orchestrator]
groups_per_step = 2
group_size = 4
"""


def test_an_agent_with_an_sdk_is_trained_like_any_other(tmp_path: Path) -> None:
    sightline("model", "tiny", "models/tiny", cwd=tmp_path)
    (tmp_path / "agent_env.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN)
    done = sightline("rl", "--plain", "run.toml", cwd=tmp_path)
    (run_line,) = [line for line in done.stdout.splitlines() if line.startswith("run: ")]
    run_dir = RunDir(tmp_path / run_line.removeprefix("run: "))
    traces = [trace for step in (1, 2) for trace in read_traces(run_dir.traces_of(step))]
    assert traces and not any(trace.error for trace in traces)
    for trace in traces:
        assert len(trace.turns) == 4 and trace.forks == {"diverged": 1}
        assert all(slot.pixel_digest for node in trace.nodes for slot in node.slots)
    found = summary(run_dir)
    # Four tasks before and after, and again with exchanged images: an edit each.
    assert found["forks"] == {"diverged": len(traces) + 12} and found["door_errors"] == 0
    assert found["bad_media"] == 0 and found["steps"] == 2
    assert found["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    last = [event for event in read_events(run_dir.metrics) if event.kind == "step"][-1]
    assert last.values["wire"]["agent_requests"] >= 4 * len(traces)
    assert all(
        b"data:image" not in path.read_bytes()
        for path in (run_dir.path / "traces").iterdir()
        if path.is_file()
    )
