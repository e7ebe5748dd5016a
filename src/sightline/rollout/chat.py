"""The handle behind Chat: messages to tokens, tokens to the server, the answer to the trace."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from sightline.envs.protocol import Messages
from sightline.errors import EngineError, EnvironmentFailed, Misaligned, Truncated
from sightline.media import MediaRef, MediaStore
from sightline.message import AssistantMessage
from sightline.render import Renderer, Tools
from sightline.rollout.client import GenerateClient
from sightline.rollout.puts import PendingPuts, plain, settled
from sightline.trace import PolicySpan, Trace, Turn
from sightline.wire.generate import GenerateRequest, SamplingParams

ROOT = -1
BYTES_PER_TOKEN = 48
"""Of a rollout in memory, as `sightline bench rollout` finds them: ids, prompt, trace."""


@dataclass
class RolloutChat:
    """One conversation. Its leaf is the last thing said; `ask` may move it to another branch."""

    trace: Trace
    renderer: Renderer
    store: MediaStore
    pending: PendingPuts
    client: GenerateClient
    modality: str
    temperature: float
    max_tokens: int
    rng: random.Random
    seed: int
    max_len: int = 0
    """Longest sequence that the server takes, prompt and answer; 0 is not known."""
    max_turns: int = 0
    """Model calls that the rollout may make; 0 is any number."""
    exchanged: tuple[MediaRef, ...] = ()
    """Shown in place of the images that are put, in order."""
    num_put: int = 0
    leaf: int = field(default=ROOT)
    num_turns: int = 0
    num_tokens: int = 0
    """Of the trace so far."""
    truncated: str = ""
    """Why the rollout was cut short; empty while it was not."""
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a thread reads the trace: nothing may be committed meanwhile."""

    def put(self, image: Any) -> MediaRef:
        if self.exchanged:
            self.num_put += 1
            return self.exchanged[(self.num_put - 1) % len(self.exchanged)]
        return self.pending.put(image)

    def get(self, ref: MediaRef) -> bytes:
        found: MediaRef = plain(ref)
        return self.store.get(found)

    @property
    def held_bytes(self) -> int:
        """What the rollout takes in memory."""
        return self.num_tokens * BYTES_PER_TOKEN + self.pending.held_bytes

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        await self.pending.settle()
        async with self.one_at_a_time:
            # In a thread: a long text takes the tokenizer a while, and other rollouts go on.
            turn = await asyncio.to_thread(
                self.trace.extend, self.leaf, settled(new_messages), self.renderer, tools
            )
        return await self._call(turn)

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        await self.pending.settle()
        async with self.one_at_a_time:
            turn = await asyncio.to_thread(
                self.trace.prepare, settled(all_messages), self.renderer, tools
            )
        return await self._call(turn)

    def _check_room(self, turn: Turn) -> None:
        """Ends the rollout before a request that cannot be served; nothing is committed."""
        if not self.truncated and 0 < self.max_turns <= self.num_turns:
            self.truncated = f"its {self.max_turns} turns are used up ([rollout] max_turns)"
        needed = len(turn.prompt_ids) + self.max_tokens
        if not self.truncated and 0 < self.max_len < needed:
            self.truncated = (
                f"the prompt of turn {self.num_turns + 1} has {len(turn.prompt_ids)} tokens; with "
                f"[rollout] max_tokens = {self.max_tokens} it needs more than the "
                f"{self.max_len} of [inference] max_len"
            )
        if self.truncated:
            raise Truncated(
                f"the rollout is cut short: {self.truncated}",
                "show less, keep a window of the history, or raise the limit",
            )

    def _check_exchanged(self, turn: Turn) -> None:
        """Images that did not come through `put` cannot be exchanged, and would go unnoticed."""
        if any(slot.item.ref not in self.exchanged for slot in turn.slots):
            raise EnvironmentFailed(
                "an image of this environment does not come through chat.put, so that it cannot "
                "be exchanged",
                "put images with chat.put and send the refs, or set [eval] tasks = 0",
            )

    async def _call(self, turn: Turn) -> AssistantMessage:
        self._check_room(turn)
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
        with self.client.making_request():
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
        new_ids = turn.new_tokens
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
            self.num_tokens += len(new_ids) + len(choice.token_ids)
        return message
