"""color-codeword's design as a verifiers environment: three turns with one coloured square each.

It does not import sightline. Its harness calls an OpenAI endpoint and it computes its own reward.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from PIL import Image

COLORS = {"1": "red", "2": "green", "3": "blue", "4": "yellow", "5": "black"}
__all__ = ["Codeword", "CodewordHarness"]


def square(color: str) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


class Data(vf.TaskData):
    answer: str


class CodewordTask(vf.Task[Data]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        answer = str(trace.info.get("said", ""))
        return sum(a == b for a, b in zip(answer, self.data.answer, strict=False)) / 3


class Codeword(vf.Taskset[CodewordTask, vf.TasksetConfig]):
    def load(self) -> Iterable[CodewordTask]:
        for i in range(20):
            answer = "".join("12345"[(i * k + k) % 5] for k in (1, 2, 3))
            yield CodewordTask(Data(answer=answer, prompt="name the colours"), self.config.task)


class CodewordHarnessConfig(vf.HarnessConfig):
    pass


class CodewordHarness(vf.Harness[CodewordHarnessConfig]):
    """Show one square per turn and send the whole history every time, as agents do."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
        data: Any,
    ) -> vf.ProgramResult:  # fmt: skip
        messages: list[dict[str, Any]] = []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for letter in data.answer:
                messages.append({"role": "user", "content": [square(COLORS[letter])]})
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                message = answer.choices[0].message
                messages.append({"role": "assistant", "content": message.content or ""})
        trace.info["said"] = "".join(m["content"] for m in messages if m["role"] == "assistant")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
