"""The header of a safetensors file that is written tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def build_header(
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], metadata: dict[str, str] | None = None
) -> bytes:
    """Return the bytes that precede the data of tensors with these shapes, in this order."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (shape, dtype) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        kind, offsets = SAFETENSORS_DTYPES[dtype], [at, at + nbytes]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        at += nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head
