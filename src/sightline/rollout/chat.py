"""The handle behind Chat: messages to tokens, tokens to the server, the answer to the trace."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import dataclass, field, replace
from typing import Any

from sightline.envs.protocol import Messages
from sightline.errors import EngineError, EnvironmentFailed, Misaligned
from sightline.media import MediaRef, MediaStore
from sightline.message import AssistantMessage, Message
from sightline.render import Renderer
from sightline.render.protocol import Tools
from sightline.rollout.client import GenerateClient
from sightline.trace import PolicySpan, Trace, Turn
from sightline.wire.generate import GenerateRequest, SamplingParams

ROOT = -1


@dataclass
class RolloutChat:
    """One conversation. Its leaf is the last thing said; `ask` may move it to another branch."""

    trace: Trace
    renderer: Renderer
    store: MediaStore
    client: GenerateClient
    modality: str
    temperature: float
    max_tokens: int
    rng: random.Random
    seed: int
    exchanged: tuple[MediaRef, ...] = ()
    """Shown in place of the images that are put, in order."""
    num_put: int = 0
    leaf: int = field(default=ROOT)
    num_turns: int = 0
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a thread reads the trace: nothing may be committed meanwhile."""
    calls: list[int] = field(default_factory=list)
    """Which of the rollout's model calls, counted from 0, went through this handle."""
    num_branches: int = 0

    def branch(self) -> RolloutChat:
        """A second handle on the trace, which goes on from where this one is.

        It draws from seeds of its own, so that branches that run side by side say the same in
        whatever order the server answers them.
        """
        self.num_branches += 1
        name = f"{self.seed}/{self.num_turns}/{self.num_branches}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        return replace(self, seed=seed, rng=random.Random(seed), calls=[], num_branches=0)

    @property
    def history(self) -> list[Message]:
        """What has been said up to here, from the first message to the last answer."""
        return [self.trace.nodes[node].message for node in self.trace.path(self.leaf)]

    @property
    def num_context_tokens(self) -> int:
        """Of the last prompt and its answer."""
        return self.trace.graph.end(self.leaf)

    @property
    def num_calls(self) -> int:
        """Model calls of the whole rollout that were answered."""
        return self.trace.graph.num_turns

    async def messages(self, messages: Messages) -> list[Message]:
        """The messages in our form, with their images taken into the store."""
        return await asyncio.to_thread(self.renderer.read, messages)

    def put(self, image: Any) -> MediaRef:
        if self.exchanged:
            self.num_put += 1
            return self.exchanged[(self.num_put - 1) % len(self.exchanged)]
        return self.store.put(image)

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        async with self.one_at_a_time:
            # In a thread: a long text takes the tokenizer a while, and other rollouts go on.
            turn = await asyncio.to_thread(
                self.trace.extend, self.leaf, new_messages, self.renderer, tools
            )
        return await self._call(turn)

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        async with self.one_at_a_time:
            turn = await asyncio.to_thread(self.trace.prepare, all_messages, self.renderer, tools)
        return await self._call(turn)

    def _check_exchanged(self, turn: Turn) -> None:
        """Images that did not come through `put` cannot be exchanged, and would go unnoticed."""
        if any(slot.item.ref not in self.exchanged for slot in turn.slots):
            raise EnvironmentFailed(
                "an image of this environment does not come through chat.put, so that it cannot "
                "be exchanged",
                "put images with chat.put and send the refs, or set [eval] tasks = 0",
            )

    async def _call(self, turn: Turn) -> AssistantMessage:
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            # A seed of its own for every turn makes a rollout the same whatever runs beside it.
            seed=(self.seed * 1_000_003 + self.num_turns) % (1 << 62),
            stop_token_ids=self.renderer.stop_token_ids,
        )
        self.num_turns += 1
        if self.exchanged:
            self._check_exchanged(turn)
        request = GenerateRequest.of(
            turn.prompt_ids, turn.slots, params, self.modality, request_id=self.trace.id
        )
        response = await self.client.generate(request)
        choice = response.choices[0]
        if choice.logprobs is None or choice.weight_versions is None:
            raise EngineError(
                "the server gave no logprobs or no weight versions",
                "train against a server started by sightline",
                kind="incomplete",
            )
        said = [entry.token_id for entry in choice.logprobs.content]
        if said != choice.token_ids:
            raise Misaligned(
                f"trace {self.trace.id}: the server's logprobs are not those of its tokens",
                "the rollout is dropped; look at the server's log",
            )
        message = await asyncio.to_thread(self.renderer.parse, choice.token_ids)
        async with self.one_at_a_time:
            node = turn.commit(
                completion_ids=choice.token_ids,
                logprobs=[entry.logprob for entry in choice.logprobs.content],
                versions=[PolicySpan.of(span) for span in choice.weight_versions],
                finish_reason=choice.finish_reason,
                pixel_digests=response.sightline.pixel_digests if response.sightline else None,
                message=message,
            )
            self.leaf = node.id
            self.calls.append(self.num_calls - 1)
        return message
