"""A chat with the policy: renders messages, samples an answer, and commits it to the trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from sightline.envs.protocol import Messages
from sightline.errors import (
    SMALLER_IMAGES,
    EngineError,
    EnvironmentFailed,
    MediaError,
    MessageError,
    PromptTooLong,
    RolloutTruncated,
)
from sightline.message import AssistantMessage, Message
from sightline.render import Renderer, Tools
from sightline.rollout.client import GenerateClient
from sightline.rollout.model_chat import ModelChat
from sightline.rollout.router import RoutedClient
from sightline.rollout.stop_strings import read_answer
from sightline.trace import Node, PolicySpan, Turn
from sightline.trace.node import ROOT
from sightline.wire.generate import (
    WRONG_ANSWER,
    Choice,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """A model call that has been committed to the trace."""

    node: Node
    message: AssistantMessage
    num_prompt_tokens: int
    num_cached_tokens: int
    """Number of prompt tokens that the engine found in its KV cache."""


@dataclass(kw_only=True)
class RolloutChat(ModelChat):
    """One conversation. `leaf` is its last message. `ask` may move it to another branch."""

    renderer: Renderer
    client: GenerateClient | RoutedClient
    modality: str
    asks_for_routes: bool = False
    max_model_len: int = 0
    """Maximum length of prompt and answer; 0 if unknown."""
    leaf: int = ROOT
    trace_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Prevents commits while a thread reads the trace."""

    @property
    def history(self) -> list[Message]:
        return [self.trace.nodes[node].message for node in self.trace.path(self.leaf)]

    @property
    def num_context_tokens(self) -> int:
        return self.trace.end(self.leaf)

    @property
    def uncertainty(self) -> float:
        turn = self.trace.last_turn(self.leaf)
        return 0.0 if turn == ROOT else -float(self.trace.nodes[turn].logprobs.numpy().mean())

    @property
    def num_calls(self) -> int:
        return self.trace.num_turns

    @property
    def num_sampled_tokens(self) -> int:
        return sum(node.num_sampled for node in self.trace.turns)

    async def messages(self, messages: Messages) -> list[Message]:
        await self.finish_writes()
        return await self.run_in_pool(
            lambda: self.renderer.read_messages(self.put_images(messages))
        )

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        self._check_running()
        turn = await self._prepare(
            lambda: self.trace.extend(
                self.leaf, self.put_images(new_messages), self.renderer, tools
            )
        )
        (answer,) = await self._call(turn, tools, self.max_tokens)
        return answer.message

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        (answer,) = await self.answer(all_messages, tools, self.max_tokens)
        return answer.message

    async def answer(
        self,
        messages: Messages,
        tools: Tools | None,
        max_tokens: int,
        stops: Sequence[str] = (),
        num_answers: int = 1,
    ) -> list[CompletedTurn]:
        """Sample answers of at most `max_tokens` tokens to a complete history.

        An answer ends with the token that completes one of the strings `stops`.
        """
        self._check_running()
        turn = await self._prepare(
            lambda: self.trace.prepare(self.put_images(messages), self.renderer, tools)
        )
        return await self._call(turn, tools, min(max_tokens, self.max_tokens), stops, num_answers)

    async def _prepare(self, make: Callable[[], Turn]) -> Turn:
        try:
            await self.finish_writes()
            async with self.trace_lock:
                # In a thread, because tokenizing a long text takes time.
                return await self.run_in_pool(make)
        except PromptTooLong as error:
            self.truncate(RolloutTruncated(error.problem, error.fix))
        except (MessageError, MediaError) as error:
            self.record_refusal(error)
            raise

    def _check_limits(self, turn: Turn, num_answers: int, max_tokens: int) -> None:
        """Raise, without a commit, if the turn exceeds a limit."""
        self._check_turn_limit(num_answers)
        needed = len(turn.prompt_ids) + max_tokens
        if 0 < self.max_model_len < needed:
            is_smaller = max_tokens < self.max_tokens
            limit = "the request's max_tokens" if is_smaller else "[rollout] max_tokens"
            self.truncate(
                RolloutTruncated(
                    f"the prompt of turn {self.num_turns + 1} is too long: it has "
                    f"{len(turn.prompt_ids)} tokens{_describe_images(turn)}, and with {limit} = "
                    f"{max_tokens} needs {needed}. The limit is [inference] max_model_len = "
                    f"{self.max_model_len}",
                    f"raise max_model_len to {needed}, send a window of the history "
                    f"(docs/conversations.md), or {SMALLER_IMAGES}",
                )
            )

    def _check_swapped(self, turn: Turn) -> None:
        """Raise if an image was not swapped because it did not go through `put`."""
        refs = (ref for slot in turn.slots for ref in slot.item.refs)
        if any(ref not in self.swapped_images for ref in refs):
            raise EnvironmentFailed(
                "the environment sends an image without chat.put, so that it cannot be swapped",
                "send the refs that chat.put returns, or set [eval] tasks = 0",
            )

    async def _call(
        self,
        turn: Turn,
        tools: Tools | None,
        max_tokens: int,
        stops: Sequence[str] = (),
        num_answers: int = 1,
    ) -> list[CompletedTurn]:
        earlier = list(self.truncations)
        await self.client.pacer.wait_for_pass()
        self._check_limits(turn, num_answers, max_tokens)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=self._next_seed(),
            stop_token_ids=self.renderer.stop_token_ids,
            n=num_answers,
            routes_from=turn.routes_from if self.asks_for_routes else None,
        )
        if self.swapped_images:
            self._check_swapped(turn)
        request = GenerateRequest.of(
            turn.prompt_ids, turn.slots, params, self.modality, request_id=self.trace.id
        )
        try:
            response = await self.client.generate(request)
        except EngineError as error:
            if error.kind == WRONG_ANSWER:
                self.failures.append(error)
            raise
        choices = sorted(response.choices, key=lambda choice: choice.index)
        turns = [await self._commit(turn, tools, choice, response, stops) for choice in choices]
        self.clear_truncations(earlier)
        return turns

    async def _commit(
        self,
        turn: Turn,
        tools: Tools | None,
        choice: Choice,
        response: GenerateResponse,
        stops: Sequence[str],
    ) -> CompletedTurn:
        """Add an answer to the trace."""
        if choice.logprobs is None or choice.weight_versions is None:
            raise EngineError(
                "the server returned no logprobs or no weight versions",
                "train with a Sightline server",
                kind="incomplete",
            )
        message, end = await self.run_in_pool(
            read_answer, self.renderer, choice.token_ids, tools, stops
        )
        kept = len(choice.token_ids) if end is None else end
        spans = [span for span in choice.weight_versions if span.start < kept]
        async with self.trace_lock:
            await self.client.pacer.wait_for_pass()
            node = turn.commit(
                completion_ids=choice.token_ids[:kept],
                logprobs=[entry.logprob for entry in choice.logprobs.content[:kept]],
                versions=[
                    PolicySpan.of(msgspec.structs.replace(span, end=min(span.end, kept)))
                    for span in spans
                ],
                finish_reason=choice.finish_reason if end is None else "stop",
                pixel_digests=response.sightline.pixel_digests if response.sightline else None,
                message=message,
                routes=None if choice.routes is None else choice.routes.numpy(),
            )
            self.leaf = node.id
            self.calls.append(self.num_calls - 1)
        cached = response.sightline.cached_tokens if response.sightline else 0
        return CompletedTurn(node, message, len(turn.prompt_ids), cached)


def _describe_images(turn: Turn) -> str:
    """Describe how many prompt tokens belong to images."""
    if not turn.slots:
        return ""
    largest = max(turn.slots, key=lambda slot: slot.length)
    of_images, ref = sum(slot.length for slot in turn.slots), largest.item.ref
    if len(turn.slots) == 1:
        return f", {of_images} of them for one image of {ref.width}x{ref.height} pixels"
    return (
        f", {of_images} of them for {len(turn.slots)} images or video steps (the largest, "
        f"{ref.width}x{ref.height} pixels, has {largest.length})"
    )
