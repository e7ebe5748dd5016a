"""What an environment is, and what it sees of the rest: tasks in, messages out, a reward back."""

from __future__ import annotations

import difflib
import inspect
import random
import reprlib
from collections.abc import Awaitable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, Self, cast

from sightline.config.load import load_object
from sightline.config.secret_refs import resolve_references
from sightline.errors import ConfigError, EnvironmentFailed, SightlineError
from sightline.media import MediaRef
from sightline.message import AssistantMessage, Message
from sightline.render.protocol import Messages, Tools


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to play. The same index, split and seed always mean the same task."""

    index: int
    split: str
    """`train`, `eval` or `sft`; no two of them share a task."""
    data: Any = None

    def __repr__(self) -> str:
        return f"Task({self.index}, {self.split!r}, {reprlib.repr(self.data)})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rollout was worth."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named measures beside the reward, shown in the metrics and not trained on."""
    per_turn: list[float] | None = None
    """What each model call earned, in order; used by `credit = "turn"`."""

    def __repr__(self) -> str:
        parts = "".join(f", {name}={value:.4g}" for name, value in self.parts.items())
        turns = "" if self.per_turn is None else f", per_turn={reprlib.repr(self.per_turn)}"
        return f"Outcome({self.reward:.4g}{parts}{turns})"


Reward = float | dict[str, float] | Outcome
"""What a rollout may return. A dict of named rewards counts as their sum."""


class Chat(Protocol):
    """The conversation of one rollout. Every token of it ends up in the trace."""

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Appends messages and returns the model's answer; costs only what is new.

        Offer the same `tools` at every turn: others make another prompt, and the trace forks.
        """
        ...

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Takes a whole history; where it differs from what was said before, the trace forks."""
        ...

    async def messages(self, messages: Messages) -> list[Message]:
        """The messages as structs, with their images taken into the store."""
        ...

    def branch(self) -> Self:
        """A second handle, which goes on from here apart from this one; both may run at once."""
        ...

    @property
    def history(self) -> list[Message]:
        """What this handle has said and heard, up to the last answer."""
        ...

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the last prompt and its answer."""
        ...

    @property
    def num_calls(self) -> int:
        """Model calls of the rollout that were answered: the length that `per_turn` must have."""
        ...

    @property
    def calls(self) -> list[int]:
        """Which of the rollout's model calls went through this handle: places in `per_turn`."""
        ...

    def put(self, image: Any) -> MediaRef:
        """Put an image (bytes, PIL image or pathlib.Path) into the store and return its ref.

        A thread writes the bytes; the next `send` or `ask` waits for it. A PIL image is encoded
        in the caller's thread, which takes about 40 ms for 1280x800. In an async rollout, use
        `await asyncio.to_thread(chat.put, image)`, or send the image itself: `user("page", image)`.
        """
        ...

    def get(self, ref: MediaRef) -> bytes:
        """The bytes of an image, as they were put. Reads the disk."""
        ...

    @property
    def base_url(self) -> str:
        """An OpenAI endpoint where the environment's own agent finds the model."""
        ...

    @property
    def api_key(self) -> str:
        """The key of this rollout there; it opens nothing once the rollout is over.

        Where `sightline eval` asks somebody's endpoint, both are that endpoint's own.
        """
        ...

    @property
    def rng(self) -> random.Random:
        """Random numbers, seeded by the rollout."""
        ...


class Environment:
    """Subclass this. `name` is what metrics and the dashboard call it."""

    name: str = "environment"
    shows_media: bool = True
    """Whether tasks need a model that sees; checked before a run starts."""
    tools: Tools | None = None
    """What its demonstrations offer the model; a rollout passes its own to `chat.send`."""
    seed: int = 0
    """Seed of its tasks, for environments that draw them."""

    def task(self, index: int, split: str) -> Task:
        """Task `index` of a split; indices go on for ever, or come round again."""
        raise NotImplementedError

    def task_rng(self, index: int, split: str) -> random.Random:
        """Draws the same numbers for a task whenever it is asked for."""
        return random.Random(f"{self.seed}:{split}:{index}")

    def rollout(self, task: Task, chat: Any) -> Awaitable[Reward] | Reward:
        """Plays the task: `async def` with a `Chat`, or `def` with a `BlockingChat`."""
        raise NotImplementedError

    def truncated(self, task: Task) -> Reward:
        """Worth of a rollout that was cut short and did not catch `RolloutTruncated` itself."""
        return 0.0

    def choose_environment(self, index: int, split: str) -> Environment:
        """The environment that plays this task; a mix of several chooses one."""
        return self

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """A conversation to imitate in a supervised warm-up. `put` takes images in."""
        raise ConfigError(
            f"environment {self.name!r} has no demonstrations",
            "give it a demonstration() method, or train on other data",
        )


def load_environment(path: str, args: dict[str, Any]) -> Environment:
    """An environment from `module:Class`, or the name of one that is built in."""
    if path.startswith("__main__:"):
        raise ConfigError(
            f"the environment {path!r} is defined in a notebook or a script, which the worker "
            "processes of a run cannot import",
            "move the class into a module beside it, environment.py say, and import it from there",
        )
    if ":" not in path and not (path.isidentifier() and find_spec(f"sightline.envs.{path}")):
        raise ConfigError(
            f"[env] name = {path!r}: no module of that name is built in",
            "name 'color_codeword', or 'module:Class' (examples/ has some; start them there)",
        )
    name = path if ":" in path else f"sightline.envs.{path}:ENVIRONMENT"
    make = load_object(name, "[env] name")
    signature = inspect.signature(make)
    try:
        signature.bind(**args)
    except TypeError as error:
        fix = "see its docs"
        for name in args.keys() - signature.parameters.keys():
            if near := difflib.get_close_matches(name, signature.parameters, cutoff=0.5):
                fix = f"is `{name}` meant to be `{near[0]}`?"
        raise ConfigError(f"[env.args] do not fit {path!r}: {error}", fix) from error
    try:
        made = cast(Environment, make(**resolve_references(args, "[env] args")))
    except SightlineError:
        raise
    except Exception as error:  # user code
        raise EnvironmentFailed(
            f"[env] name = {path!r} cannot be built: {type(error).__name__}: {error}",
            f"mend it, or give what it needs in [env.args]; play it: `sightline try {path}`",
        ) from error
    if hasattr(made, "shows_images"):
        raise ConfigError(
            f"the environment {path!r} has `shows_images`, which nothing reads",
            "call it `shows_media`: videos are meant, too",
        )
    return made
