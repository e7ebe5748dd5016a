"""The digest that identifies a version by its bits. It is computed on the weights' device.

The tensors' bytes, in file order, fill rows of 1,024 words of 32 bits. Every tensor starts a new
row, and its last row is padded with zeros. Each word is multiplied by two odd factors, one for its
column and one for its row. SHA-256 hashes the sum modulo 2**64, the names, dtypes and shapes.
Integer sums do not depend on the device or the order. A single changed word always changes the
digest. Several changed words do, except with a probability of about 2**-32. The digest detects
damage and tells versions apart. It does not authenticate: tokens and leases do.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import msgspec
import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from sightline.compute.tensor_file import (
    SAFETENSORS_DTYPES,
    NamedTensors,
    resolve_dtype,
    sort_names,
)

ROW_WORDS = 1024
ROW_BYTES = 4 * ROW_WORDS
CHUNK_ROWS = 256
"""Rows that the host processes at a time, so that they fit its cache."""
_ROW_SEED = 1 << 32
_INT64 = 1 << 64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of splitmix64."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    """The dtype's name as safetensors writes it."""
    shape: tuple[int, ...]


def digest_weights(tensors: NamedTensors) -> str:
    """Return 64 hex digits that identify these tensors."""
    row, sums = 0, []
    for name in sort_names(tensors):
        sums.append(sum_words(tensors[name], row))
        row += count_rows(tensors[name].nbytes)
    return finish_digest(describe_tensors(tensors), sum(map(int, sums)))


def finish_digest(specs: list[TensorSpec], total: int) -> str:
    """Return the digest of tensors whose weighted words sum to `total`."""
    described = [[spec.name, spec.dtype, *spec.shape] for spec in specs]
    return hashlib.sha256(json.dumps([described, total % _INT64]).encode()).hexdigest()


def describe_tensors(tensors: NamedTensors, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """List names, dtypes and shapes in the digest's order, floating tensors as `dtype` if given."""
    kinds = {name: resolve_dtype(tensor, dtype) for name, tensor in tensors.items()}
    names = sort_names(tensors, dtype)
    return [TensorSpec(n, SAFETENSORS_DTYPES[kinds[n]], tuple(tensors[n].shape)) for n in names]


def count_rows(nbytes: int) -> int:
    return -(-nbytes // ROW_BYTES)


def sum_words(tensor: Tensor, first_row: int = 0) -> Int64[Tensor, ""]:
    """Return the contribution of a tensor that starts at `first_row`, on its device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:  # words must be aligned
        data = data.clone()
    num_rows = len(data) // ROW_BYTES
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    chunk = CHUNK_ROWS if data.device.type == "cpu" else max(num_rows, 1)
    for begin in range(0, num_rows, chunk):
        end = min(begin + chunk, num_rows)
        total += _sum_rows(data[begin * ROW_BYTES : end * ROW_BYTES], first_row + begin)
    if rest := len(data) - num_rows * ROW_BYTES:
        last = data.new_zeros(ROW_BYTES)
        last[:rest] = data[num_rows * ROW_BYTES :]
        total += _sum_rows(last, first_row + num_rows)
    return total


def _sum_rows(data: Tensor, first_row: int) -> Tensor:
    words = data.view(torch.int32).view(-1, ROW_WORDS)
    end = first_row + len(words)
    rows = _factors(_ROW_SEED, 1 << (end - 1).bit_length(), data.device)[first_row:end]
    places = _factors(0, ROW_WORDS, data.device)
    if data.device.type == "cpu":  # numpy is twice as fast as torch for integers
        return (torch.from_numpy(words.numpy().astype(np.int64) @ places.numpy()) * rows).sum()
    from sightline.compute.triton_kernels import sum_weighted_words

    return sum_weighted_words(words, places, rows)


@lru_cache(maxsize=4)
def _factors(seed: int, count: int, device: torch.device) -> Int64[Tensor, " count"]:
    """Return pseudorandom odd factors: splitmix64 of `count` positions starting at `seed`."""
    places = np.arange(seed, seed + count, dtype=np.uint64)
    factors = splitmix64((places + np.uint64(1)) * GOLDEN) | np.uint64(1)
    return torch.from_numpy(factors.view(np.int64)).to(device)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 to uint64 values."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
