"""The digest of weights: what names a version by its bits, computed where the weights are.

The bytes of the tensors, in the order of a file, fill rows of 1,024 words of 32 bits; every tensor
begins a row, and zeros fill its last. A word counts by an odd factor of its place in the row, times
one of the row, and the sum modulo 2**64 goes, with the names, dtypes and shapes, through SHA-256.
Integers add up alike on every device and in every order. One word that changed always shows; more
of them do not with a chance of about 2**-32 or less. It finds damage, and tells versions apart; who
may write weights at all is the business of tokens and leases.
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
"""Rows whose products are in a host's memory at a time: what fits a cache."""
_ROW_SEED = 1 << 32
_INT64 = 1 << 64


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    """The dtype's name as safetensors writes it."""
    shape: tuple[int, ...]


def digest_weights(tensors: NamedTensors) -> str:
    """64 hex digits that name these tensors."""
    row, sums = 0, []
    for name in sort_names(tensors):
        sums.append(sum_words(tensors[name], row))
        row += count_rows(tensors[name].nbytes)
    return finish_digest(describe_tensors(tensors), sum(int(one) for one in sums))


def finish_digest(specs: list[TensorSpec], total: int) -> str:
    """The digest of tensors whose words add up to `total`."""
    described = [[spec.name, spec.dtype, *spec.shape] for spec in specs]
    return hashlib.sha256(json.dumps([described, total % _INT64]).encode()).hexdigest()


def describe_tensors(tensors: NamedTensors, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Names, dtypes and shapes, floating ones as `dtype` if it is given, in the digest's order."""
    kinds = {name: resolve_dtype(tensor, dtype) for name, tensor in tensors.items()}
    return [
        TensorSpec(name, SAFETENSORS_DTYPES[kinds[name]], tuple(tensors[name].shape))
        for name in sort_names(tensors, dtype)
    ]


def count_rows(nbytes: int) -> int:
    return -(-nbytes // ROW_BYTES)


def sum_words(tensor: Tensor, first_row: int = 0) -> Int64[Tensor, ""]:
    """What the words of a tensor, which begins at `first_row`, add to the digest; on its device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:  # words have to be aligned
        data = data.clone()
    whole = len(data) // ROW_BYTES
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    chunk = CHUNK_ROWS if data.device.type == "cpu" else max(whole, 1)
    for begin in range(0, whole, chunk):
        end = min(begin + chunk, whole)
        total += _sum_rows(data[begin * ROW_BYTES : end * ROW_BYTES], first_row + begin)
    if rest := len(data) - whole * ROW_BYTES:
        last = data.new_zeros(ROW_BYTES)
        last[:rest] = data[whole * ROW_BYTES :]
        total += _sum_rows(last, first_row + whole)
    return total


def _sum_rows(data: Tensor, first_row: int) -> Tensor:
    words = data.view(torch.int32).view(-1, ROW_WORDS)
    end = first_row + len(words)
    rows = _factors(_ROW_SEED, 1 << (end - 1).bit_length(), data.device)[first_row:end]
    places = _factors(0, ROW_WORDS, data.device)
    if data.device.type == "cpu":  # numpy takes half of torch's time for integers
        return (torch.from_numpy(words.numpy().astype(np.int64) @ places.numpy()) * rows).sum()
    from sightline.compute.triton_kernels import sum_weighted_words

    return sum_weighted_words(words, places, rows)


@lru_cache(maxsize=4)
def _factors(seed: int, count: int, device: torch.device) -> Int64[Tensor, " count"]:
    """Odd factors that look random: splitmix64 of the places from `seed` on."""
    x = (np.arange(seed, seed + count, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
