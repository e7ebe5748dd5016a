"""Triton kernels for CUDA. Imported only on CUDA, because other torch builds lack Triton.

All kernels are batch-invariant: every program computes whole rows or heads, or one fixed part of
their keys, in a fixed order. Intermediate results are rounded to the model's dtype where
transformers rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Keys that one program attends to. Fixed, so that a row's sums do not depend on the batch."""
KEYS_AT_ONCE = 64
SAMPLE_CHUNK = 2048
"""Vocabulary ids that one program processes."""
BLOCK_HEADS = 8
"""Heads of a token that one program rotates."""
DIGEST_ROWS = 8
"""Rows of words that one program sums."""


# --- attention of one token per row over paged keys and values


@triton.jit
def _paged_attention_kernel(
    q, keys, values, block_tables, seq_lens, first_seen, parts, maxima, sums, scale, q_stride,
    block_table_stride, num_splits,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(0)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    start = split * SPLIT
    if start >= seq_len:
        return
    end = tl.minimum(start + SPLIT, seq_len)
    rows = tl.arange(0, GROUP_ROWS)  # heads that share keys, query by query
    d, e = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_VALUE)
    is_head = rows[:, None] < GROUP * QUERIES
    at = rows // GROUP * (kv_heads * GROUP) + head * GROUP + rows % GROUP
    if QUERIES > 1:
        limit = tl.minimum(tl.load(first_seen + row).to(tl.int32) + rows // GROUP, end)
    query = tl.load(
        q + row * q_stride + at[:, None] * WIDTH + d[None, :],
        mask=is_head & (d[None, :] < WIDTH),
        other=0.0,
    )
    top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    # A matrix product also sums the weights, because its order does not depend on the row count.
    total = tl.zeros([GROUP_ROWS, 16], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, values.dtype.element_ty)
    out = tl.zeros([GROUP_ROWS, BLOCK_VALUE], tl.float32)
    for first in range(start, end, KEYS):
        index = first + tl.arange(0, KEYS)
        block = tl.load(block_tables + row * block_table_stride + first // BLOCK_SIZE).to(tl.int64)
        place = (block * BLOCK_SIZE + first % BLOCK_SIZE + tl.arange(0, KEYS)) * kv_heads + head
        is_seen = index < end
        key = tl.load(
            keys + place[None, :] * WIDTH + d[:, None],
            mask=is_seen[None, :] & (d[:, None] < WIDTH),
            other=0.0,
        )
        value = tl.load(
            values + place[:, None] * VALUE_WIDTH + e[None, :],
            mask=is_seen[:, None] & (e[None, :] < VALUE_WIDTH),
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        if QUERIES > 1:
            score = tl.where(index[None, :] < limit[:, None], score, float("-inf"))
        else:
            score = tl.where(is_seen[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = new_top
        if QUERIES > 1:  # some of which may see no key of this part
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        rescale = tl.exp2(top - base)
        weight = weight.to(value.dtype)
        total = tl.dot(weight, ones, total * rescale[:, None], input_precision="ieee")
        out = tl.dot(weight, value, out * rescale[:, None], input_precision="ieee")
        top = new_top
    place = (row * (kv_heads * GROUP * QUERIES) + at) * num_splits + split
    tl.store(
        parts + place[:, None] * VALUE_WIDTH + e[None, :],
        out,
        mask=is_head & (e[None, :] < VALUE_WIDTH),
    )
    tl.store(maxima + place, top, mask=rows < GROUP * QUERIES)
    tl.store(sums + place, tl.max(total, 1), mask=rows < GROUP * QUERIES)


@triton.jit
def _combine_splits_kernel(
    parts, maxima, sums, seq_lens, out, num_splits,
    QUERIES: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    e = tl.arange(0, BLOCK_VALUE)
    used = tl.cdiv(tl.load(seq_lens + row // QUERIES).to(tl.int32), SPLIT)
    place = row * tl.num_programs(0) + head
    top, total = float("-inf"), 0.0
    mixed = tl.zeros([BLOCK_VALUE], tl.float32)
    for split in range(used):
        at = place * num_splits + split
        part_top = tl.load(maxima + at)
        part = tl.load(parts + at * VALUE_WIDTH + e, mask=e < VALUE_WIDTH, other=0.0)
        new_top = tl.maximum(top, part_top)
        rescale, weight = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        mixed = mixed * rescale + part * weight
        total = total * rescale + tl.load(sums + at) * weight
        top = new_top
    # An idle row has no keys, so its total is 0.
    mixed = mixed / tl.where(used > 0, total, 1.0)
    tl.store(out + place * VALUE_WIDTH + e, mixed.to(out.dtype.element_ty), mask=e < VALUE_WIDTH)


def attend_paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scaling: float,
    first_seen: Tensor | None = None,
) -> Tensor:
    """Return the attention output of each row's query (rows, heads, width).

    Row i sees its first `seq_lens[i]` keys, in the blocks that `block_tables[i]` lists, of keys and
    values (blocks, block_size, kv_heads, width). With `first_seen` a row has several queries (rows,
    queries, heads, width): the first sees `first_seen[i]` keys, and each next query one more, up to
    `seq_lens[i]`. A query's result has the same bits as if it were computed alone.
    """
    shape = (*q.shape[:-1], values.shape[-1])
    queries = 1 if first_seen is None else q.shape[1]
    num_rows, (heads, width) = len(q), q.shape[-2:]
    if not q[0].is_contiguous():
        q = q.contiguous()
    block_size, kv_heads, value_width = values.shape[1:]
    num_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT)
    group = heads // kv_heads
    group_rows = max(16, triton.next_power_of_2(group * queries))
    sizes = (num_rows * queries, heads, num_splits)
    parts = q.new_empty((*sizes, value_width), dtype=torch.float32)
    maxima = q.new_empty(sizes, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    out = q.new_empty(shape)
    block_value = triton.next_power_of_2(value_width)
    _paged_attention_kernel[kv_heads, num_splits, num_rows](
        q, keys, values, block_tables, seq_lens, seq_lens if first_seen is None else first_seen,
        parts, maxima, sums, scaling * 1.4426950408889634, q.stride(0), block_tables.stride(0),
        num_splits,
        GROUP=group, WIDTH=width, VALUE_WIDTH=value_width,
        BLOCK_WIDTH=triton.next_power_of_2(width), BLOCK_VALUE=block_value,
        BLOCK_SIZE=block_size, SPLIT=SPLIT,
        KEYS=min(KEYS_AT_ONCE * 2 // q.element_size(), block_size),
        GROUP_ROWS=group_rows, QUERIES=queries,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _combine_splits_kernel[heads, num_rows * queries](
        parts, maxima, sums, seq_lens, out, num_splits, QUERIES=queries,
        VALUE_WIDTH=value_width, BLOCK_VALUE=block_value, SPLIT=SPLIT, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _write_paged_kernel(
    k, v, keys, values, block_tables, seq_lens, k_stride, v_stride, block_table_stride,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    last = tl.load(seq_lens + row).to(tl.int32) - 1
    if last < 0:
        return
    block = tl.load(block_tables + row * block_table_stride + last // BLOCK_SIZE).to(tl.int64)
    place = block * BLOCK_SIZE + last % BLOCK_SIZE
    at = tl.arange(0, BLOCK)
    key = tl.load(k + row * k_stride + at, mask=at < KEY_SIZE)
    tl.store(keys + place * KEY_SIZE + at, key, mask=at < KEY_SIZE)
    value = tl.load(v + row * v_stride + at, mask=at < VALUE_SIZE)
    tl.store(values + place * VALUE_SIZE + at, value, mask=at < VALUE_SIZE)


def write_paged(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, seq_lens: Tensor
) -> None:
    """Write each row's new key and value (rows, kv_heads, width) at its last position."""
    sizes = [x.shape[1] * x.shape[2] for x in (k, v)]
    k, v = (x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _write_paged_kernel[(len(k),)](
        k, v, keys, values, block_tables, seq_lens,
        k.stride(0), v.stride(0), block_tables.stride(0),
        KEY_SIZE=sizes[0], VALUE_SIZE=sizes[1], BLOCK=triton.next_power_of_2(max(sizes)),
        BLOCK_SIZE=keys.shape[1],
    )  # fmt: skip


# --- operations between a layer's matrix products


@triton.jit
def _rms_norm_kernel(x, weight, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_in = at < SIZE
    read = tl.load(x + row * stride + at, mask=is_in, other=0.0)
    value = read.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = (value * scale).to(read.dtype).to(tl.float32)
    weights = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, (weights * normed).to(read.dtype), mask=is_in)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(x.shape[-1])
    _rms_norm_kernel[(len(flat),)](
        flat, weight, out, flat.stride(0), eps, SIZE=x.shape[-1], BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _rotate_heads_kernel(
    q, k, cos, sin, q_weight, k_weight, q_out, k_out, q_stride, k_stride, cos_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    x, weight, out = q + token * q_stride, q_weight, q_out + token * Q_HEADS * WIDTH
    if block >= Q_BLOCKS:
        x, weight, out = k + token * k_stride, k_weight, k_out + token * K_HEADS * WIDTH
    heads = tl.where(block >= Q_BLOCKS, K_HEADS, Q_HEADS)
    first = tl.where(block >= Q_BLOCKS, block - Q_BLOCKS, block) * BLOCK_HEADS
    head = (first + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, WIDTH)
    HALF: tl.constexpr = WIDTH // 2
    other = tl.where(d < HALF, d + HALF, d - HALF)
    read = tl.load(x + head * WIDTH + d[None, :], mask=head < heads, other=0.0)
    turned = tl.load(x + head * WIDTH + other[None, :], mask=head < heads, other=0.0)
    kind = read.dtype
    value, turned = read.to(tl.float32), turned.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        value = (value * scale).to(kind).to(tl.float32)
        turned = (turned * scale).to(kind).to(tl.float32)
        value = (tl.load(weight + d).to(tl.float32)[None, :] * value).to(kind).to(tl.float32)
        turned = (tl.load(weight + other).to(tl.float32)[None, :] * turned).to(kind)
        turned = turned.to(tl.float32)
    turned = tl.where(d[None, :] < HALF, -turned, turned)
    straight = value * tl.load(cos + token * cos_stride + d).to(tl.float32)[None, :]
    across = turned * tl.load(sin + token * cos_stride + d).to(tl.float32)[None, :]
    if ROUNDS:
        straight, across = straight.to(kind).to(tl.float32), across.to(kind).to(tl.float32)
    mixed = (straight + across).to(kind)
    tl.store(out + head * WIDTH + d[None, :], mixed, mask=head < heads)


def rotate_heads(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    rounds: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to queries and keys (tokens, heads x width), normalized by `weights`
    first if given. Return (tokens, heads, width). With `rounds`, each product is rounded, as in a
    text model. A vision tower rounds only their sum."""
    width = cos.shape[-1]
    outs = [x.new_empty((len(x), x.shape[1] // width, width)) for x in (q, k)]
    num_heads = [x.shape[1] for x in outs]
    q_weight, k_weight = weights or (q, k)
    _rotate_heads_kernel[sum(triton.cdiv(num, BLOCK_HEADS) for num in num_heads), len(q)](
        q, k, cos, sin, q_weight, k_weight, *outs, q.stride(0), k.stride(0), cos.stride(0), eps,
        Q_HEADS=num_heads[0], K_HEADS=num_heads[1], WIDTH=width, BLOCK_HEADS=BLOCK_HEADS,
        HAS_NORM=weights is not None, ROUNDS=rounds,
        num_warps=max(1, BLOCK_HEADS * width // 256),
        enable_fp_fusion=False,  # products are rounded before they are added
    )  # fmt: skip
    return outs[0], outs[1]


@triton.jit
def _silu_mul_kernel(
    gate, up, out, gate_stride, up_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < SIZE
    read = tl.load(gate + row * gate_stride + at, mask=is_in, other=0.0)
    opened = read.to(tl.float32)
    opened = (opened / (1.0 + tl.exp(-opened))).to(read.dtype).to(tl.float32)
    value = tl.load(up + row * up_stride + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, (opened * value).to(read.dtype), mask=is_in)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    size = gate.shape[-1]
    rows = [x.flatten(0, -2) for x in (gate, up)]  # views, even if they are parts of wider rows
    out = gate.new_empty(gate.shape)
    _silu_mul_kernel[len(rows[0]), triton.cdiv(size, 1024)](
        *rows, out, *(x.stride(0) for x in rows), SIZE=size, BLOCK=1024
    )
    return out


# --- sampling


@triton.jit
def _sample_chunks_kernel(
    logits, banned, temperatures, maxima, sums, best, stride, vocab, CHUNK: tl.constexpr
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    is_in = at < vocab
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    value = tl.load(logits + row * stride + at, mask=is_in, other=float("-inf")).to(tl.float32)
    is_out = tl.load(banned + at, mask=is_in, other=1) != 0
    value = tl.where(is_out, float("-inf"), value / temperature)
    top = tl.max(value, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    place = row * tl.num_programs(0) + chunk
    tl.store(maxima + place, top)
    tl.store(sums + place, tl.sum(tl.exp(value - base), 0))
    tl.store(best + place, chunk * CHUNK + tl.argmax(value, 0))


@triton.jit
def _sample_tokens_kernel(
    logits, banned, temperatures, uniform, maxima, sums, best, tokens, logprobs, stride, vocab,
    num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    place, is_in = row * num_chunks + chunks, chunks < num_chunks
    tops = tl.load(maxima + place, mask=is_in, other=float("-inf"))
    top = tl.max(tops, 0)
    share = tl.load(sums + place, mask=is_in, other=0.0).to(tl.float64)
    share = share * tl.exp(tops - top).to(tl.float64)
    total = tl.sum(share, 0)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        target = tl.load(uniform + row) * total
        ends = tl.cumsum(share, 0)
        # The first chunk that ends after the target, at most the last with any probability.
        last = tl.max(tl.where(share > 0, chunks, 0), 0)
        chunk = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), last)
        before = tl.sum(tl.where(chunks < chunk, share, 0.0), 0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
        is_out = tl.load(banned + at, mask=at < vocab, other=1) != 0
        value = tl.where(is_out, float("-inf"), value.to(tl.float32) / temperature)
        chance = tl.exp(value - top).to(tl.float64)
        ends = tl.cumsum(chance, 0)
        last = tl.max(tl.where(chance > 0, tl.arange(0, CHUNK), 0), 0)
        index = tl.minimum(tl.sum((ends <= target - before).to(tl.int32), 0), last)
        # Rounding may end the sum on a token of probability 0: take the next possible token.
        index = tl.min(
            tl.where((tl.arange(0, CHUNK) >= index) & (chance > 0), tl.arange(0, CHUNK), last), 0
        )
        token = chunk * CHUNK + index
    else:
        temperature = 1.0
        token = tl.load(best + row * num_chunks + tl.argmax(tops, 0))
    chosen = tl.load(logits + row * stride + token).to(tl.float32) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    # Subtract the maximum first and continue in float64, because float32 would lose digits.
    logprob = (chosen - top).to(tl.float64) - tl.log(total)
    tl.store(logprobs + row, logprob.to(tl.float32))


def sample_tokens(
    logits: Tensor, banned: Tensor, temperature: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token per row without filters, and return tokens and logprobs.

    Temperature 0 picks the most likely token. `banned` masks ids. `uniform` is float64 in [0, 1).
    """
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, SAMPLE_CHUNK)
    maxima = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    sums, best = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _sample_chunks_kernel[num_chunks, num_rows](
        logits, banned, temperature, maxima, sums, best, logits.stride(0), vocab, CHUNK=SAMPLE_CHUNK
    )
    _sample_tokens_kernel[(num_rows,)](
        logits, banned, temperature, uniform, maxima, sums, best, tokens, logprobs,
        logits.stride(0), vocab, num_chunks,
        CHUNK=SAMPLE_CHUNK, CHUNKS=triton.next_power_of_2(num_chunks),
    )  # fmt: skip
    return tokens, logprobs


# --- digest sums


@triton.jit
def _weighted_words_kernel(
    words, places, rows, sums, num_rows, WORDS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WORDS)
    is_row = row < num_rows
    found = tl.load(
        words + row[:, None] * WORDS + column[None, :], mask=is_row[:, None], other=0
    ).to(tl.int64)
    total = tl.sum(found * tl.load(places + column)[None, :], 1)
    total = total * tl.load(rows + row, mask=is_row, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def sum_weighted_words(words: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Sum int32 words modulo 2**64, each multiplied by the int64 factors of its column and row, in
    one pass that stores no products."""
    num_rows, width = words.shape
    num_programs = triton.cdiv(num_rows, DIGEST_ROWS)
    sums = torch.empty(num_programs, dtype=torch.int64, device=words.device)
    _weighted_words_kernel[(num_programs,)](
        words, places, rows, sums, num_rows, WORDS=width, ROWS=DIGEST_ROWS
    )
    return sums.sum()
