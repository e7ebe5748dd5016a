"""Packing loses no token, and lays every sequence out as if it were alone."""

from __future__ import annotations

from pathlib import Path

import making
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sightline.errors import PixelMismatch
from sightline.families import load_family
from sightline.families.protocol import Packing
from sightline.media import MediaStore
from sightline.pack import PackSize, pack
from sightline.wire import Slot
from sightline.wire.sample import Sample


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 10**6), tokens=st.sampled_from([1, 60, 150, 10**6]))
def test_every_trained_token_is_packed_once_with_its_values(
    tiny_model: Path, store: MediaStore, seed: int, tokens: int
) -> None:
    samples = making.samples(tiny_model, store, count=5, seed=seed)
    packs = pack(samples, 1, load_family(tiny_model), PackSize(tokens, 10**6))
    weight = sum(float(p.loss_weight.numpy().sum()) for p in packs)
    assert weight == pytest.approx(1.0, rel=1e-5)
    positions: dict[str, list[float]] = {}
    for packed in packs:
        for origin in packed.origins:
            part = packed.logprobs.numpy()[origin.start : origin.stop]
            positions.setdefault(origin.trace_id, []).extend(part.tolist())
        if len(packs) > 1 and len(packed.token_ids) > tokens:
            assert len({o.trace_id for o in packed.origins}) == 1, "only alone may it be larger"
    assert positions == {s.trace_id: s.logprobs.numpy().tolist() for s in samples}


def test_packed_sequence_layout_does_not_depend_on_others(
    tiny_model: Path, store: MediaStore
) -> None:
    family = load_family(tiny_model)
    samples = making.samples(tiny_model, store, count=4, seed=3)
    packed = pack(samples, 1, family, PackSize(10**6, 10**6))[0]
    ends = packed.subtree_end.numpy()
    start = 0
    by_tokens = {s.token_ids.data: s for s in samples}
    while start < len(ends):
        end = int(ends[start])
        sample = by_tokens[packed.token_ids.numpy()[start:end].tobytes()]
        placed = [Slot(s.offset, s.length, sample.items[s.item]) for s in sample.slots]
        alone, _ = family.positions(end - start, placed)
        assert np.array_equal(packed.positions.numpy()[:, start:end], alone)
        assert (ends[start:end] == end).all()
        assert packed.parent.numpy()[start] == -1
        assert np.array_equal(packed.parent.numpy()[start + 1 : end], np.arange(start, end - 1))
        start = end


def test_padded_rows_fit_with_their_padding(tiny_model: Path, store: MediaStore) -> None:
    family = load_family(tiny_model)
    family.packing = Packing("rows", "the test says so")
    samples = making.samples(tiny_model, store, count=8, seed=3)
    lengths = sorted(len(s.token_ids.numpy()) for s in samples)
    limit = 2 * lengths[-1]
    packs = pack(samples, 1, family, PackSize(limit, 10**6))
    sizes = [np.unique(p.subtree_end.numpy(), return_counts=True)[1] for p in packs]
    assert sorted(np.concatenate(sizes).tolist()) == lengths
    assert all(rows.max() * len(rows) <= limit for rows in sizes)
    assert any(len(rows) > 1 for rows in sizes)


def test_a_distinct_image_is_listed_once(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=8, seed=5)
    packed = pack(samples, 1, load_family(tiny_model), PackSize(10**6, 10**6))[0]
    keys = [entry.item.key for entry in packed.items]
    assert len(keys) == len(set(keys)) < sum(len(s.slots) for s in samples)
    assert len(packed.slots) == sum(len(s.slots) for s in samples)


def test_different_sampler_pixels_for_one_image_are_refused(
    tiny_model: Path, store: MediaStore
) -> None:
    sample = next(s for s in making.samples(tiny_model, store, count=6, seed=5) if s.slots)
    slots = [Slot(s.offset, s.length, s.item, "0" * 32) for s in sample.slots]
    other: Sample = msgspec.structs.replace(sample, trace_id="other", slots=slots)
    with pytest.raises(PixelMismatch, match="same Pillow"):
        pack([sample, other], 1, load_family(tiny_model), PackSize(10**6, 10**6))
