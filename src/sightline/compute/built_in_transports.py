"""The built-in weight transports. Their code needs torch, so it is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sightline.compute.weight_transport import WeightPublisher, WeightTransport
from sightline.config import RunFile
from sightline.media.stored_file import open_blobs
from sightline.run import RunDir
from sightline.wire.weights import Manifest

if TYPE_CHECKING:
    from sightline.compute.broadcast import BroadcastReceiver
    from sightline.compute.tensor_file import NamedTensors


class FilesTransport(WeightTransport):
    """Files in the run directory, which the trainer and the servers share."""

    has_files = True

    def open_publisher(self, config: RunFile, run_dir: RunDir) -> WeightPublisher:
        from sightline.compute.weights import FilesPublisher

        return FilesPublisher(run_dir.weights)

    @contextmanager
    def open_tensors(self, folder: Path, manifest: Manifest) -> Iterator[NamedTensors]:
        from sightline.compute.weights import read_tensors

        yield read_tensors(folder, manifest)


class StoreTransport(FilesTransport):
    """Files in the store at `[media] root`. Servers download them before reading."""

    sends_manifest = reaches_other_machines = True

    def open_publisher(self, config: RunFile, run_dir: RunDir) -> WeightPublisher:
        from sightline.compute.weights import StorePublisher

        token = config.media.read_token(for_control=True)
        blobs = open_blobs(config.media.root or run_dir.media, token)
        return StorePublisher(run_dir.weights, blobs)


class BroadcastTransport(WeightTransport):
    """torch.distributed over gloo. Limited to one machine, as connections are unauthenticated."""

    sends_manifest = is_sent_once = True
    _receiver: BroadcastReceiver | None = None

    def open_publisher(self, config: RunFile, run_dir: RunDir) -> WeightPublisher:
        from sightline.compute.broadcast import Broadcaster

        return Broadcaster(run_dir.weights, config.trainer.address, len(config.server_names))

    @contextmanager
    def open_tensors(self, folder: Path, manifest: Manifest) -> Iterator[NamedTensors]:
        from sightline.compute.broadcast import BroadcastReceiver

        if self._receiver is None:
            self._receiver = BroadcastReceiver()
        yield self._receiver.receive(manifest)


class IpcTransport(WeightTransport):
    """Memory that the trainer shares with the servers on its machine."""

    keeps_copy = True
    takes_adapters = False

    def open_publisher(self, config: RunFile, run_dir: RunDir) -> WeightPublisher:
        from sightline.compute.shared_weights import SharedWeights

        return SharedWeights(run_dir.weights)

    def open_tensors(
        self, folder: Path, manifest: Manifest
    ) -> AbstractContextManager[NamedTensors]:
        from sightline.compute.shared_weights import map_shared

        return map_shared(folder.parent, manifest)
