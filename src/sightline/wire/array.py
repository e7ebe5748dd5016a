"""Arrays on the wire: raw bytes with dtype and shape."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from sightline.errors import Misaligned

DTYPES = ("uint8", "int16", "int32", "int64", "float32")


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A numpy array as bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise Misaligned(f"its dtype is {self.dtype!r}", f"use one of {', '.join(DTYPES)}")
        nbytes = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if min(self.shape, default=0) < 0 or nbytes != len(self.data):
            raise Misaligned(
                f"array of shape {self.shape} and dtype {self.dtype} has {len(self.data)} bytes, "
                f"not {nbytes}",
                "the message is damaged. Send it again",
            )

    @classmethod
    def of(cls, values: object, dtype: str) -> Array:
        array = np.ascontiguousarray(values, dtype=dtype)
        return cls(dtype=dtype, shape=array.shape, data=array.tobytes())

    def numpy(self) -> np.ndarray:
        """Return a read-only view of the bytes."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0
