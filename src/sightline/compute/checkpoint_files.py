"""The parameters of a checkpoint, read from its files one by one, as the model holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sightline.errors import WeightsError
from sightline.wire.weights import is_transposed


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of safetensors files. Files that are gone or cut off are found on opening."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        opened = [safe_open(path, framework="pt") for path in paths]
        self._files = {name: file for file in opened for name in file.keys()}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class CheckpointParameters(Mapping[str, Tensor]):
    """The parameters of a checkpoint folder, with the names and shapes of `own`."""

    def __init__(self, folder: Path, own: Mapping[str, Tensor]) -> None:
        self._opened = open_checkpoint(folder)
        self._own = own
        if missing := sorted(own.keys() - self._opened.keys())[:3]:
            raise WeightsError(
                f"{folder} stores its parameters under other names than the model's, which has "
                f"{missing}: this engine takes no adapters for it",
                'set [lora] publish = "merged"',
            )

    def __getitem__(self, name: str) -> Tensor:
        wanted, tensor = self._own[name].shape, self._opened[name]
        return tensor.transpose(-1, -2) if is_transposed(tensor.shape, wanted) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def open_checkpoint(folder: Path) -> TensorFiles:
    return TensorFiles(sorted(folder.glob("*.safetensors")))


def find_transposed(opened: TensorFiles, own: Mapping[str, Tensor]) -> list[str]:
    """Parameters that files of a checkpoint hold the other way round, as some hold experts."""
    return [
        name
        for name, tensor in own.items()
        if name in opened and is_transposed(opened.shape(name), tensor.shape)
    ]
