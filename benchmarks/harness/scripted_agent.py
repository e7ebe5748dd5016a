"""An agent that plays rollouts through the chat endpoint, like a program with an OpenAI SDK.

It keeps its own history, with every image as a data URL, and sends all of it with each request. It
runs in the benchmark's process, whose CPU time and memory are not measured.
"""

from __future__ import annotations

import base64
import random

import aiohttp
import msgspec
from aiohttp import web

from sightline.bench.harness.screenshots import Screenshots
from sightline.envs.protocol import Chat, Outcome, Task
from sightline.errors import EnvironmentFailed

AGENT_PATH = "/agent/v1/play"
AGENT_SCREENSHOTS = "benchmarks.harness.scripted_agent:AgentScreenshots"
"""The environment's name in a run file."""


class AgentRequest(msgspec.Struct):
    """A rollout for an agent to play."""

    base_url: str
    api_key: str
    seed: int
    turns: int
    width: int
    height: int


class AgentScreenshots(Screenshots):
    """Rollouts played through `chat.base_url` by an agent at the address `agent`."""

    def __init__(self, turns: int, width: int, height: int, agent: str) -> None:
        super().__init__(turns, width, height)
        self.agent = agent

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        request = AgentRequest(
            base_url=chat.base_url,
            api_key=chat.api_key,
            seed=chat.rng.randrange(1 << 31),
            turns=self.turns,
            width=self.width,
            height=self.height,
        )
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(self.agent, data=msgspec.json.encode(request)) as answer,
        ):
            if answer.status != 200:
                raise EnvironmentFailed(
                    f"the agent at {self.agent} failed: {await answer.text()}",
                    "fix the error that it names",
                )
        return Outcome(reward=chat.rng.random())


async def run_agent(http: web.Request) -> web.Response:
    agent_request = msgspec.json.decode(await http.read(), type=AgentRequest)
    pages, rng = (
        Screenshots(1, agent_request.width, agent_request.height),
        random.Random(agent_request.seed),
    )
    headers = {
        "authorization": f"Bearer {agent_request.api_key}",
        "content-type": "application/json",
    }
    history: list[bytes] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for turn in range(agent_request.turns):
            history.append(_page_message(turn, pages.draw(rng)))
            body = b'{"model":"policy","messages":[' + b",".join(history) + b"]}"
            url = f"{agent_request.base_url}/chat/completions"
            async with session.post(url, data=body, headers=headers) as answer:
                reply = await answer.json()
                if answer.status != 200:
                    return web.json_response(reply, status=502)
            history.append(msgspec.json.encode(reply["choices"][0]["message"]))
    return web.json_response({})


def _page_message(turn: int, page: bytes) -> bytes:
    url = "data:image/png;base64," + base64.b64encode(page).decode()
    parts = [
        {"type": "text", "text": f"page {turn}"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return msgspec.json.encode({"role": "user", "content": parts})
