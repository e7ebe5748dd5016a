"""The environment protocol: tasks, the chat with the model, and rewards."""

from __future__ import annotations

import bisect
import difflib
import hashlib
import importlib
import inspect
import itertools
import random
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, Self, cast

from sightline.config import EnvConfig
from sightline.config.load import load_object
from sightline.config.secret_refs import resolve_references
from sightline.errors import ConfigError, EnvironmentFailed, SightlineError, format_command
from sightline.media import MediaRef
from sightline.message import AssistantMessage, Message
from sightline.render.protocol import Messages, Tools


@dataclass(frozen=True, slots=True)
class Task:
    """A task. The same index, split and seed always mean the same task."""

    index: int
    split: str
    """`train`, `eval` or `sft`. No task is in two splits."""
    data: Any = None

    def __repr__(self) -> str:
        return f"Task({self.index}, {self.split!r}, {reprlib.repr(self.data)})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a rollout."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Named metrics for logs and charts. They do not affect training."""
    per_turn: list[float] | None = None
    """Reward of each model call, in order. Used by `credit = "turn"`."""

    def __repr__(self) -> str:
        parts = "".join(f", {name}={value:.4g}" for name, value in self.parts.items())
        turns = "" if self.per_turn is None else f", per_turn={reprlib.repr(self.per_turn)}"
        return f"Outcome({self.reward:.4g}{parts}{turns})"


Reward = float | dict[str, float] | Outcome
"""The return value of a rollout. A dict of named rewards counts as their sum."""


class Chat(Protocol):
    """The conversation of one rollout. The trace records every token of it."""

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Append messages and return the model's answer. Only new messages cost time.

        Pass the same `tools` at every turn. Different tools change the prompt, and the trace forks.
        """

    async def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Send a complete history. The trace forks where it differs from the current one."""

    async def messages(self, messages: Messages) -> list[Message]:
        """Return the messages as structs, and put their images into the store."""

    def branch(self) -> Self:
        """Return a second chat that continues from here. Both may run concurrently."""

    @property
    def history(self) -> list[Message]:
        """The messages of this chat, up to the last answer."""

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in the last prompt and its answer."""

    @property
    def uncertainty(self) -> float:
        """Mean negative logprob of the last answer's tokens; 0 if the endpoint gives none."""
        ...

    @property
    def num_calls(self) -> int:
        """Number of answered model calls in the rollout: the required length of `per_turn`."""

    @property
    def calls(self) -> list[int]:
        """Indices in `per_turn` of the model calls made through this chat."""

    def put(self, image: Any) -> MediaRef:
        """Put an image (bytes, PIL image or pathlib.Path) into the store and return its ref.

        A thread writes the bytes, and the next `send` or `ask` waits for it. A PIL image is encoded
        in the caller's thread, which takes about 40 ms for 1280x800. In an async rollout, use
        `await asyncio.to_thread(chat.put, image)`, or send the image itself: `user("page", image)`.
        """

    def get(self, ref: MediaRef) -> bytes:
        """Return an image's bytes. This reads from disk."""

    @property
    def base_url(self) -> str:
        """Base URL of an OpenAI endpoint through which agent programs can call the model."""

    @property
    def api_key(self) -> str:
        """This rollout's API key for `base_url`. It becomes invalid when the rollout ends.

        When `sightline eval` uses an external endpoint, both belong to that endpoint.
        """

    @property
    def rng(self) -> random.Random:
        """Random number generator, seeded for the rollout."""


class Environment:
    """Base class of environments. Metrics and the dashboard use its `name`."""

    name: str = "environment"
    shows_media: bool = True
    """Whether tasks need a vision model. Checked before a run starts."""
    tools: Tools | None = None
    """Tools for demonstrations. A rollout passes its own to `chat.send`."""
    seed: int = 0
    """Seed of `task_rng`."""

    def task(self, index: int, split: str) -> Task:
        """Return task `index` of a split. Any index starting at 0 must work."""
        raise NotImplementedError

    def task_rng(self, index: int, split: str) -> random.Random:
        """Return a random number generator that is seeded by the task."""
        return random.Random(f"{self.seed}:{split}:{index}")

    def rollout(self, task: Task, chat: Any) -> Awaitable[Reward] | Reward:
        """Run the task: `async def` with a `Chat`, or `def` with a `BlockingChat`."""
        raise NotImplementedError

    def truncated(self, task: Task) -> Reward:
        """Return the reward of a truncated rollout that did not catch `RolloutTruncated`."""
        return 0.0

    def describe_task(self, task: Task) -> str:
        """Return a line about a task for `sightline try`, such as its source and correct answer."""
        return ""

    def choose_environment(self, index: int, split: str) -> tuple[Environment, int]:
        """Return the environment of this task, and the task's index in it.

        A mix chooses one of its members.
        """
        return self, index

    @property
    def has_demonstrations(self) -> bool:
        """Return whether `sightline sft` can train on its demonstrations."""
        return type(self).demonstration is not Environment.demonstration

    def demonstration(self, task: Task, put: Any, rng: random.Random) -> list[Message]:
        """Return a conversation for supervised training. `put` stores an image."""
        raise ConfigError(
            f"environment {self.name!r} has no demonstrations",
            "add a demonstration() method, or train on other data",
        )


def load_environment(path: str, args: dict[str, Any]) -> Environment:
    """Build an environment from `module:Class` or from a built-in name."""
    if path.startswith("__main__:"):
        raise ConfigError(
            f"the environment {path!r} is defined in a notebook or a script, which worker "
            "processes cannot import",
            "move the class into a module such as environment.py, and import it from there",
        )
    if ":" not in path and not (path.isidentifier() and find_spec(f"sightline.envs.{path}")):
        raise ConfigError(
            f"[env] name = {path!r} is not a built-in environment",
            "use 'dataset', 'color_codeword' or 'module:Class'. Start an example in its own folder",
        )
    name = path if ":" in path else f"sightline.envs.{path}:ENVIRONMENT"
    make = load_object(name, "[env] name")
    check_arguments(make, (), args, f"[env.args] does not fit {path!r}")
    try:
        environment = make(**resolve_references(args, "[env] args"))
        if hasattr(environment, "shows_media"):
            return cast(Environment, environment)
        raise ConfigError(
            f"[env] name = {path!r} is not an environment", "derive it from Environment"
        )
    except SightlineError:
        raise
    except Exception as error:  # user code
        raise EnvironmentFailed(
            f"[env] name = {path!r} cannot be built: {type(error).__name__}: {error}",
            "fix it, or pass what it needs in [env.args]. Test it with "
            f"`{format_command('sightline', 'try', path)}`",
        ) from error


def check_arguments(
    function: Callable[..., Any], values: Sequence[Any], args: Mapping[str, Any], problem: str
) -> None:
    """Raise `problem` if a function does not take these values and keyword arguments."""
    if not callable(function):
        raise ConfigError(f"{problem}: it cannot be called", "name a function or a class")
    signature = inspect.signature(function)
    try:
        signature.bind(*values, **args)
    except TypeError as error:
        fix = "check its parameters"
        for name in args.keys() - signature.parameters.keys():
            if near := difflib.get_close_matches(name, signature.parameters, cutoff=0.5):
                fix = f"did you mean `{near[0]}` instead of `{name}`?"
        raise ConfigError(f"{problem}: {error}", fix) from error


def import_extra(module: str, extra: str) -> Any:
    """Import a module, or raise an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{extra}: the module {error.name!r} is not installed",
            f"run `pip install 'sightline-rl[{extra}]'` where the workers run",
        ) from error


class EnvironmentMix(Environment):
    """Mix of environments. A task's index and split determine its environment.

    In training, the members alternate by index, and each counts its own tasks: with n members, task
    i is task `i // n` of member `i % n`. The run's task order chooses indices by weight. In other
    splits, a hash of the index draws a member by weight.
    """

    name = "mix"

    def __init__(self, members: Sequence[tuple[Environment, float]]) -> None:
        names = [env.name for env, _ in members]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"[[env.mix]] has two environments called {name!r}",
                    "give one of them a `label`, because metrics are grouped by name",
                )
        self.members = [env for env, _ in members]
        self.shows_media = any(env.shows_media for env in self.members)
        self._stops = list(itertools.accumulate(weight for _, weight in members))

    def choose_environment(self, index: int, split: str) -> tuple[Environment, int]:
        if split == "train":
            number, member = divmod(index, len(self.members))
            return self.members[member], number
        drawn = hashlib.blake2b(f"{split}:{index}".encode(), digest_size=8).digest()
        at = int.from_bytes(drawn, "big") / 2**64 * self._stops[-1]
        return self.members[min(bisect.bisect_right(self._stops, at), len(self.members) - 1)], index


def build_environment(env: EnvConfig) -> Environment:
    """Build the environment, or the mix of environments, that `[env]` describes."""
    if not env.mix:
        return load_environment(env.name, env.args)
    members = []
    for share in env.mix:
        member = load_environment(share.name, share.args)
        if share.label:
            member.name = share.label
        members.append((member, share.weight_at(0.5)))
    return EnvironmentMix(members)
