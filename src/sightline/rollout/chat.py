"""The handle behind Chat: messages to tokens, tokens to the server, the answer to the trace."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sightline.envs.protocol import Messages
from sightline.errors import (
    EngineError,
    EnvironmentFailed,
    MediaError,
    MessageError,
    Misaligned,
    RolloutTruncated,
    SightlineError,
    TurnLimitReached,
)
from sightline.media import MediaRef, MediaStore
from sightline.message import AssistantMessage, Message
from sightline.render import Renderer, Tools
from sightline.rollout.client import GenerateClient
from sightline.rollout.put_pool import PendingPuts, unwrap_ref, unwrap_refs
from sightline.run.stages import NO_STAGE, Stage
from sightline.trace import Node, PolicySpan, Trace, Turn
from sightline.wire.generate import GenerateRequest, SamplingParams, join_version_labels

if TYPE_CHECKING:
    from sightline.rollout.intercept import InterceptionServer

T = TypeVar("T")

ROOT = -1
MAX_REFUSAL_CHARS = 500
"""Characters of a refusal that the trace keeps."""


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """A model call that is in the trace."""

    node: Node
    message: AssistantMessage
    num_prompt_tokens: int
    """Tokens of the prompt."""
    num_cached_tokens: int
    """Of these, what the engine still knew."""


TRACE_BYTES_PER_TOKEN = 48
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
    pool: Executor | None = None
    """Threads for what is done here, which user code has no part in; None is the loop's own."""
    max_model_len: int = 0
    """Longest sequence that the server takes, prompt and answer; 0 is not known."""
    max_turns: int = 0
    """Model calls that the rollout may make; 0 is any number."""
    exchanged: tuple[MediaRef, ...] = ()
    """Shown in place of the images that are put, in order."""
    interception: InterceptionServer | None = None
    api_key: str = ""
    """Leads a request at `base_url` to this chat."""
    failure: SightlineError | None = None
    """What broke a promise while an agent asked; the agent may go on, the rollout is dropped."""
    num_put: int = 0
    substitutes: dict[str, MediaRef] = field(default_factory=dict)
    """By the digest of an agent's own image, the one that is shown for it."""
    leaf: int = field(default=ROOT)
    num_turns: int = 0
    truncations: list[RolloutTruncated] = field(default_factory=list)
    """Why the rollout was cut short; branches share it."""
    trace_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a thread reads the trace: nothing may be committed meanwhile."""
    _substitutes_lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[int] = field(default_factory=list)
    """Which of the rollout's model calls, counted from 0, went through this handle."""
    num_branches: int = 0
    stage: Stage = NO_STAGE
    """The rollout's, which holds those of its turns."""
    environment_began: float | None = field(default_factory=time.time)
    """When the environment's turn to act began; None while an answer is awaited."""

    def branch(self) -> RolloutChat:
        """A second handle on the trace, which goes on from where this one is.

        It draws from seeds of its own, so that branches that run side by side say the same in
        whatever order the server answers them.
        """
        self.num_branches += 1
        name = f"{self.seed}/{self.num_turns}/{self.num_branches}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        return replace(
            self,
            seed=seed,
            rng=random.Random(seed),
            calls=[],
            num_branches=0,
            environment_began=time.time(),
        )

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
        await self.pending.settle()
        return await self.run_in_pool(self.renderer.read_messages, unwrap_refs(messages))

    async def run_in_pool(self, work: Callable[..., T], *args: Any) -> T:
        """Does in a thread what would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)

    def put(self, image: Any) -> MediaRef:
        if self.exchanged:
            self.num_put += 1
            return self.exchanged[(self.num_put - 1) % len(self.exchanged)]
        return self.pending.put(image)

    def get(self, ref: MediaRef) -> bytes:
        found: MediaRef = unwrap_ref(ref)
        return self.store.get(found)

    @property
    def held_bytes(self) -> int:
        """What the rollout takes in memory."""
        return self.trace.num_tokens * TRACE_BYTES_PER_TOKEN + self.pending.held_bytes

    @property
    def truncated(self) -> str:
        """Why the rollout was cut short; empty while it was not."""
        return self.truncations[0].problem if self.truncations else ""

    @property
    def base_url(self) -> str:
        """Where an agent of the environment's own finds the model, as an OpenAI endpoint."""
        if self.interception is None:
            raise EnvironmentFailed(
                "this chat has no endpoint", "play the environment with rollout.play.Player"
            )
        return self.interception.base_url

    def substitute_image(self, url: str, ref: MediaRef) -> MediaRef:
        """What is shown for an image that an agent sent, in any thread.

        An agent sends its history again with every request, so that an image keeps its stand-in.
        """
        if not self.exchanged or (url.startswith("media:") and ref in self.exchanged):
            return ref
        with self._substitutes_lock:
            if ref.digest not in self.substitutes:
                self.substitutes[ref.digest] = self.put(None)
            return self.substitutes[ref.digest]

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        with self._begin_turn() as stage:
            turn = await self._prepare(
                lambda: self.trace.extend(
                    self.leaf, unwrap_refs(new_messages), self.renderer, tools
                ),
                stage,
            )
            return (await self._call(turn, self.max_tokens, stage)).message

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return (await self.answer(all_messages, tools, self.max_tokens)).message

    async def answer(
        self, messages: Messages, tools: Tools | None, max_tokens: int
    ) -> CompletedTurn:
        """The call that follows a whole history, at most `max_tokens` long."""
        with self._begin_turn() as stage:
            turn = await self._prepare(
                lambda: self.trace.prepare(unwrap_refs(messages), self.renderer, tools), stage
            )
            return await self._call(turn, min(max_tokens, self.max_tokens), stage)

    @contextlib.contextmanager
    def _begin_turn(self) -> Iterator[Stage]:
        if self.trace.ended:
            # No Exception: user code that goes on after any of those would never end.
            raise asyncio.CancelledError("the rollout is over")
        self.end_environment_stage()
        with self.stage.begin("turn", turn=self.num_turns + 1) as stage:
            try:
                yield stage
            finally:
                self.environment_began = time.time()

    def end_environment_stage(self) -> None:
        """The environment has acted: it asks, or it is done."""
        if self.environment_began is not None:
            self.stage.add_finished(
                "environment", self.environment_began, time.time(), after_turn=self.num_turns
            )
            self.environment_began = None

    async def _prepare(self, make: Callable[[], Turn], stage: Stage) -> Turn:
        try:
            with stage.begin("render"):
                await self.pending.settle()
                async with self.trace_lock:
                    # In a thread: a long text takes the tokenizer a while, and others go on.
                    return await self.run_in_pool(make)
        except (MessageError, MediaError) as error:
            self.record_refusal(error)
            raise

    def record_refusal(self, error: SightlineError) -> None:
        """Keeps on the trace that a message, or a request of an agent, was not taken."""
        self.trace.door_errors.append(
            f"{type(error).__name__}: {error.problem}"[:MAX_REFUSAL_CHARS]
        )

    def _check_limits(self, turn: Turn) -> None:
        """Ends the rollout before a request that cannot be served; nothing is committed."""
        if 0 < self.max_turns <= self.num_calls:
            self.truncations.append(
                TurnLimitReached(
                    "the rollout is cut short: its turns are used up, "
                    f"[rollout] max_turns = {self.max_turns}",
                    "end the rollout sooner, or raise the limit",
                )
            )
        needed = len(turn.prompt_ids) + self.max_tokens
        if 0 < self.max_model_len < needed:
            self.truncations.append(
                RolloutTruncated(
                    f"the rollout is cut short: the prompt of turn {self.num_turns + 1} has "
                    f"{len(turn.prompt_ids)} tokens; with [rollout] max_tokens = "
                    f"{self.max_tokens} it needs more than the {self.max_model_len} of "
                    "[inference] max_model_len",
                    "show less, keep a window of the history, or raise the limit",
                )
            )
        if self.truncations:
            first = self.truncations[0]
            raise type(first)(first.problem, first.fix)

    def _check_exchanged(self, turn: Turn) -> None:
        """Images that did not come through `put` cannot be exchanged, and would go unnoticed."""
        if any(slot.item.ref not in self.exchanged for slot in turn.slots):
            raise EnvironmentFailed(
                "an image of this environment does not come through chat.put, so that it cannot "
                "be exchanged",
                "put images with chat.put and send the refs, or set [eval] tasks = 0",
            )

    async def _call(self, turn: Turn, max_tokens: int, stage: Stage) -> CompletedTurn:
        await self.client.pacer.turn()
        self._check_limits(turn)
        params = SamplingParams(
            max_tokens=max_tokens,
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
        stage.note(
            rollout_id=self.trace.id, prompt_tokens=len(turn.prompt_ids), images=len(turn.slots)
        )
        response = await self.client.generate(request, stage)
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
        message = await self.run_in_pool(self.renderer.parse, choice.token_ids)
        async with self.trace_lock:
            await self.client.pacer.turn()
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
        cached = response.sightline.cached_tokens if response.sightline else 0
        stage.note(
            sampled_tokens=len(choice.token_ids),
            cached_tokens=cached,
            policy_version=join_version_labels(choice.weight_versions),
            finish_reason=choice.finish_reason,
        )
        return CompletedTurn(node, message, len(turn.prompt_ids), cached)
