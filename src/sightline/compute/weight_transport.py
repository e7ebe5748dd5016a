"""Weight transports, which send versions from the trainer to the inference servers.

    trainer  publisher.take --> publisher.write --manifest--> orchestrator --adopt--> servers
                                publisher.send ---------------------------------------^
    server   WeightReceiver.open_tensors(folder, manifest): the version's tensors, verified

Shared code calls the transport that `[trainer] publish` names, and never compares names. To add a
transport, a package registers a subclass of `WeightTransport` under the transport's name, in the
entry point group `sightline.weight_transports`. Servers load transports by the name in a manifest,
so they accept only registered names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sightline.config import RunFile
from sightline.errors import ConfigError, WeightsError
from sightline.run import RunDir
from sightline.wire.weights import FILES, Manifest

if TYPE_CHECKING:
    import torch

    from sightline.compute.tensor_file import Gather, NamedTensors

    OpenedTensors = AbstractContextManager[NamedTensors]

AUTO, SHARED = "auto", "ipc"
ENTRY_POINT_GROUP = "sightline.weight_transports"
BUILT_IN = {
    FILES: "sightline.compute.built_in_transports:FilesTransport",
    "store": "sightline.compute.built_in_transports:StoreTransport",
    "broadcast": "sightline.compute.built_in_transports:BroadcastTransport",
    SHARED: "sightline.compute.built_in_transports:IpcTransport",
}


class WeightPublisher(ABC):
    """Rank 0's side of a transport. It exists as long as the trainer runs."""

    @abstractmethod
    def take(self, tensors: NamedTensors, gather: Gather, dtype: torch.dtype | None = None) -> None:
        """Copy the weights, floating ones as `dtype`. Return when they may change again.

        Sharded tensors are gathered one by one, so that the device holds one of them at a time.
        """

    @abstractmethod
    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        """Write the manifest of the last weights taken, and return it with its path.

        `draft` lacks the digest and the tensors' location. A background thread calls this method.
        """

    def send(self, manifest: Manifest) -> None:  # noqa: B027 (optional: most have nothing to send)
        """Send a version whose manifest the servers have. Return when all have received it."""


class WeightTransport(ABC):
    """Base class of weight transports. Importing or creating one must not import torch."""

    name: str
    has_files: ClassVar[bool] = False
    """Whether a version is stored as safetensors files, which vLLM, external servers and
    checkpoints/best need."""
    sends_manifest: ClassVar[bool] = False
    """Whether a server gets the manifest itself, in case it cannot read the run directory."""
    reaches_other_machines: ClassVar[bool] = False
    is_sent_once: ClassVar[bool] = False
    """Whether a server that starts after a version was sent can no longer adopt it."""
    keeps_copy: ClassVar[bool] = False
    """Whether rank 0 keeps a copy of the published weights on its device."""
    takes_adapters: ClassVar[bool] = True
    """Whether versions may be adapters. Otherwise, they are whole weights."""

    @abstractmethod
    def open_publisher(self, config: RunFile, run_dir: RunDir) -> WeightPublisher:
        """Return rank 0's side of the transport."""

    @abstractmethod
    def open_tensors(self, folder: Path, manifest: Manifest) -> OpenedTensors:
        """Return the tensors of a manifest in `folder`, checked against its digest.

        They may become invalid after the `with` block. A server reuses the same object.
        """

    def check(self, config: RunFile) -> None:
        """Raise if this transport does not fit the run's other settings."""
        problem = fix = ""
        if config.launch.has_other_machines and not self.reaches_other_machines:
            problem = "does not reach other machines"
            fix = self._list_others("reaches_other_machines")
        elif config.inference.servers and not self.has_files:
            problem = "does not work with [inference] servers, which take files"
            fix = self._list_others("has_files")
        elif config.eval.every and not self.has_files:
            problem = "does not work with [eval] every, which needs files for checkpoints/best"
            fix = f"{self._list_others('has_files')}, or every = 0"
        if problem:
            raise ConfigError(f'[trainer] publish = "{config.trainer.publish}" {problem}', fix)

    def _list_others(self, ability: str) -> str:
        names = [name for name in list_transports() if getattr(load_transport(name), ability)]
        return "set publish = " + " or ".join(f'"{name}"' for name in names)


class WeightReceiver:
    """A server's side. It keeps transports and their connections open between versions."""

    def __init__(self) -> None:
        self._transports: dict[str, WeightTransport] = {}

    def open_tensors(self, folder: Path, manifest: Manifest) -> OpenedTensors:
        name = manifest.transport
        if name not in self._transports:
            try:
                self._transports[name] = load_transport(name)
            except ConfigError as error:
                raise WeightsError(error.problem, error.fix) from error
        return self._transports[name].open_tensors(folder, manifest)


def list_plugins(group: str, built_in: Mapping[str, str]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name: `built_in` ones and those of distributions."""
    built_in_points = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
    return {point.name: point for point in entry_points(group=group)} | built_in_points


def list_transports() -> list[str]:
    """Return the names of all transports: built-in ones and those of installed distributions."""
    return sorted(list_plugins(ENTRY_POINT_GROUP, BUILT_IN))


def load_transport(name: str) -> WeightTransport:
    """Return a new instance of the transport with this name."""
    points = list_plugins(ENTRY_POINT_GROUP, BUILT_IN)
    if name not in points:
        known = ", ".join(sorted(points))
        fix = f"set [trainer] publish to one of {known}, or install the package that provides it"
        raise ConfigError(f"{name[:100]!r} is not a weight transport", fix)
    transport: WeightTransport = points[name].load()()
    transport.name = name
    return transport


def find_transport(
    config: RunFile,
    has_gpu: bool = False,
    can_adopt: Callable[[WeightTransport], bool] = lambda transport: True,
) -> WeightTransport:
    """Return the transport of `[trainer] publish`.

    `auto` shares memory if the trainer and the servers use GPUs of one machine, the servers
    `can_adopt` it, and nothing needs files.
    """
    if config.trainer.publish != AUTO:
        return load_transport(config.trainer.publish)
    needs_files = bool(
        config.inference.servers or config.eval.every or config.launch.has_other_machines
    )
    shared = load_transport(SHARED)
    shares = has_gpu and not needs_files and not config.lora.wants_adapters and can_adopt(shared)
    return shared if shares else load_transport(FILES)
