"""Inference engines: their capabilities, how their servers start, and their clients.

Shared code calls methods of the `InferenceEngine` that `[inference] engine` names, and never
compares engine names. To add an engine, a distribution defines an entry point in the group
`sightline.engines`. Its name is the engine's, and its value is a subclass of `InferenceEngine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from sightline.compute.weight_transport import WeightTransport, list_plugins
from sightline.config import InferenceConfig, RunFile
from sightline.errors import ConfigError
from sightline.families import Family
from sightline.families.rope import check_length
from sightline.rollout.client import GenerateClient
from sightline.wire.codec import check_release

ENTRY_POINT_GROUP = "sightline.engines"
BUILT_IN = {
    "torch": "sightline.inference.torch_engine:TorchInference",
    "vllm": "sightline.inference.vllm_plugin.command:VllmInference",
}
ENGINE_SETTINGS = ("python", "tensor_parallel_size", "data_parallel_size", "engine_args")
"""`[inference]` settings that only some engines read."""

FetchJson = Callable[[str], dict[str, Any]]
"""Returns the JSON object at a server's path, or an empty object if the server refuses."""


class InferenceEngine(ABC):
    """One kind of engine. Instances are cheap: only `serve` imports heavy dependencies."""

    name: str
    settings: ClassVar[frozenset[str]] = frozenset()
    """The settings in `ENGINE_SETTINGS` that this engine reads."""
    inexact_reason: ClassVar[str] = ""
    """Reason why the engine does not support `[model] exact = true`. Empty if it does."""

    reports_routes: ClassVar[bool] = False
    """Whether servers accept `routes_from`, and report the experts of each token."""

    @abstractmethod
    def serve(self, spec: Any) -> None:
        """Serve a `sightline.inference.server_spec.ServerSpec` until SIGTERM or SIGINT."""

    def can_adopt(self, transport: WeightTransport) -> bool:
        """Return whether this engine's servers can adopt weights from this transport."""
        return transport.has_files

    def takes_adapters(self, has_plain_names: bool) -> bool:
        """Return whether servers apply LoRA adapters to the run's checkpoint.

        `has_plain_names` is true if the checkpoint has transformers' parameter names.
        """
        return False

    def check(self, config: RunFile, family: Family) -> None:
        """Raise if this engine cannot serve the run. Called before anything starts."""
        self.check_settings(config.inference)
        check_length(family.position_limit, config.inference.max_model_len)

    def check_settings(self, inference: InferenceConfig) -> None:
        """Raise if `[inference]` has a setting that this engine does not read."""
        defaults = InferenceConfig()
        for name in ENGINE_SETTINGS:
            if name not in self.settings and getattr(inference, name) != getattr(defaults, name):
                names = [
                    f'engine = "{e}"' for e in list_engines() if name in load_engine(e).settings
                ]
                raise ConfigError(
                    f"[inference] {name} requires {' or '.join(names)} (it is {self.name!r})",
                    f"remove {name}, or change [inference] engine",
                )

    def check_server(self, config: RunFile, family: Family, address: str, fetch: FetchJson) -> None:
        """Raise if a server that the run did not start would not serve it as expected."""
        health = fetch("/health")
        fetch("/v1/models")  # unlike /health, this route requires the token
        where = f"[inference] servers: {address}"
        if "fingerprint" not in health:
            raise ConfigError(
                f"{where} is not a Sightline server", "start it with `sightline serve`"
            )
        check_release(str(health.get("release", "")), where)
        expected = {"fingerprint": family.fingerprint, "engine": config.inference.engine}
        for name, value in expected.items():
            if health[name] != value:
                raise ConfigError(
                    f"{where} has {name} {health[name]!r}, but the run has {value!r}"
                    + (f". Its settings are {health['settings']}" if name == "fingerprint" else ""),
                    "serve the checkpoint of [model] path with the same settings, or change the "
                    "run's",
                )
        if health["max_model_len"] < config.inference.max_model_len:
            raise ConfigError(
                f"{where} accepts {health['max_model_len']} tokens, but the run has "
                f"max_model_len = {config.inference.max_model_len}",
                "start it with a larger --max-model-len, or lower max_model_len",
            )

    def describe(self, family: Family) -> str:
        """Return a note for users about serving this family. Empty for none."""
        return ""

    def build_client(self, url: str, **options: Any) -> GenerateClient:
        """Return a client for one server. `options` are fields of `GenerateClient`."""
        return GenerateClient(url, **options)


def list_engines() -> list[str]:
    """Return the names of all engines, built-in or from installed distributions."""
    return sorted(list_plugins(ENTRY_POINT_GROUP, BUILT_IN))


@cache
def load_engine(name: str) -> InferenceEngine:
    """Return the engine that `[inference] engine` names."""
    points = list_plugins(ENTRY_POINT_GROUP, BUILT_IN)
    if name not in points:
        raise ConfigError(
            f"[inference] engine = {name!r} is not an engine",
            f"choose one of {', '.join(points)}, or install the package that provides it",
        )
    engine: InferenceEngine = points[name].load()()
    engine.name = name
    return engine
