"""An agent outside of everything: asks the chat endpoint for its next move, with all pages so far.

It stands for a program with an OpenAI SDK: its history is its own, with every image as a data
URL, and goes with each request. It runs beside the scripted policy, in a process that no figure
of the rollouts includes.
"""

from __future__ import annotations

import base64
import random

import aiohttp
import msgspec
from aiohttp import web

from sightline.bench.harness.screenshots import Screenshots

AGENT_PATH = "/agent/v1/play"


class AgentRequest(msgspec.Struct):
    """What an agent is sent to do."""

    base_url: str
    api_key: str
    seed: int
    turns: int
    width: int
    height: int


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
                answered = await answer.json()
                if answer.status != 200:
                    return web.json_response(answered, status=502)
            history.append(msgspec.json.encode(answered["choices"][0]["message"]))
    return web.json_response({})


def _page_message(turn: int, page: bytes) -> bytes:
    url = "data:image/png;base64," + base64.b64encode(page).decode()
    parts = [
        {"type": "text", "text": f"page {turn}"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return msgspec.json.encode({"role": "user", "content": parts})
