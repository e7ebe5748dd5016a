"""A chat without a model, for environments. Answers come from a list or a function."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from sightline.media import MediaStore
from sightline.message import AssistantMessage, Message, assistant

Answer = str | Message


class ScriptedChat:
    """Records the messages and tools that it receives."""

    def __init__(self, store: MediaStore, answers: Sequence[Answer] | Callable[[], Answer]) -> None:
        self.store = store
        self.answers = answers if callable(answers) else iter(list(answers)).__next__
        self.seen: list[Message] = []
        self.tools: list[Any] = []
        self.rng = random.Random(0)

    def put(self, image: Any) -> Any:
        return self.store.put(image)

    async def send(self, new_messages: Any, tools: Any = None) -> AssistantMessage:
        self.seen += new_messages
        self.tools.append(tools)
        answer = self.answers()
        reply = assistant(answer) if isinstance(answer, str) else answer
        return AssistantMessage(
            role="assistant", content=reply.content, tool_calls=reply.tool_calls
        )

    async def ask(self, all_messages: Any, tools: Any = None) -> AssistantMessage:
        raise AssertionError
