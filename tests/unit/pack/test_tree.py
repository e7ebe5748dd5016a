"""A group as a tree: every path is its sample, and shared tokens are stored once."""

from __future__ import annotations

import random
from pathlib import Path

import making
import msgspec
import numpy as np
import pytest

from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import PackSize, pack
from sightline.pack.tree import build_units, measure_unit, order_depth_first
from sightline.wire import Slot
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.sample import Sample

WIDE = PackSize(10**6, 10**6)


def paths_of(packed: MicroBatch) -> dict[str, list[int]]:
    """For each trace, the tokens that its last trained token sees, found through `parent`."""
    parent, trained = packed.parent.numpy(), packed.trained.numpy()
    paths = {}
    for origin in packed.origins:
        path, at = [], int(trained[origin.stop - 1])
        while at >= 0:
            path.append(at)
            at = int(parent[at])
        paths[origin.trace_id] = path[::-1]
    return paths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [60, 150, 10**6])
def test_every_tree_path_equals_its_sample(
    tiny_model: Path, store: MediaStore, seed: int, tokens: int
) -> None:
    family = load_family(tiny_model)
    samples = {s.trace_id: s for s in making.group(tiny_model, store, count=7, seed=seed)}
    packs = pack(list(samples.values()), 1, family, PackSize(tokens, 10**6))
    leaves = set()
    for packed in packs:
        ends, index = packed.subtree_end.numpy(), np.arange(len(packed.token_ids))
        items = [entry.item for entry in packed.items]
        for name, path in paths_of(packed).items():
            sample = samples[name]
            # Tokens after a sample's last trained token do not matter.
            upto = int(sample.trained.numpy()[-1]) + 1
            assert len(path) == upto
            assert np.array_equal(packed.token_ids.numpy()[path], sample.token_ids.numpy()[:upto])
            ancestors = np.flatnonzero((index <= path[-1]) & (path[-1] < ends))
            assert ancestors.tolist() == path, "its path, and nothing of its siblings"
            placed = [Slot(s.offset, s.length, sample.items[s.item]) for s in sample.slots]
            alone, _ = family.positions(len(sample.token_ids), placed)
            assert np.array_equal(packed.positions.numpy()[:, path], alone[:, :upto])
            keys = {slot.offset: items[slot.item].key for slot in packed.slots}
            wanted = {path[s.offset]: sample.items[s.item].key for s in sample.slots}
            assert wanted.items() <= keys.items()
        leaves |= {origin.trace_id for origin in packed.origins}
    assert leaves == samples.keys()
    assert sum(float(p.loss_weight.numpy().sum()) for p in packs) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_each_sample_keeps_its_own_values_even_for_shared_tokens(
    tiny_model: Path, store: MediaStore, seed: int
) -> None:
    samples = making.group(tiny_model, store, count=6, seed=seed)
    twin: Sample = msgspec.structs.replace(
        samples[0], trace_id="twin", advantages=samples[0].logprobs
    )
    (packed,) = pack([*samples, twin], 1, load_family(tiny_model), WIDE)
    (without,) = pack(samples, 1, load_family(tiny_model), WIDE)
    assert packed.token_ids == without.token_ids, "a twin brings no token"
    values: dict[str, list[float]] = {}
    for origin in packed.origins:
        part = packed.advantages.numpy()[origin.start : origin.stop]
        values.setdefault(origin.trace_id, []).extend(part.tolist())
    assert values == {s.trace_id: s.advantages.numpy().tolist() for s in [*samples, twin]}


def test_sharing_stops_at_a_different_image(tiny_model: Path, store: MediaStore) -> None:
    sample = next(s for s in making.group(tiny_model, store, count=3) if s.slots)
    other_ref = store.put(making.image(random.Random(99), 64, 64))
    item = load_family(tiny_model).item(other_ref)
    changed = msgspec.structs.replace(sample.items[0], ref=item.ref)
    other = msgspec.structs.replace(
        sample, trace_id="other", items=[changed, *sample.items[1:]],
    )  # fmt: skip
    rows = order_depth_first([sample, other])
    first = min(slot.offset for slot in sample.slots if slot.item == 0)
    assert [row.shared for row in rows] == [0, first]


def test_oversized_tree_is_split_with_repeated_paths(tiny_model: Path, store: MediaStore) -> None:
    samples = making.group(tiny_model, store, count=8, seed=2)
    whole = measure_unit(order_depth_first(samples))
    limit = PackSize(whole.tokens // 2, 10**6)
    pieces = build_units(samples, limit)
    assert len(pieces) > 1 and all(piece[0].shared == 0 for piece in pieces)
    assert all(measure_unit(piece).fits(limit) or len(piece) == 1 for piece in pieces)
    assert sum(measure_unit(piece).tokens for piece in pieces) > whole.tokens


def test_group_with_little_sharing_is_packed_flat(tiny_model: Path, store: MediaStore) -> None:
    samples = making.samples(tiny_model, store, count=4, seed=3)
    assert [len(unit) for unit in build_units(samples, WIDE)] == [1] * 4


@pytest.mark.parametrize("shares_group", [True, False])
def test_a_micro_batch_has_one_temperature(
    tiny_model: Path, store: MediaStore, shares_group: bool
) -> None:
    """Its logits are divided by one number, whatever samples share a prefix or a group."""
    samples = making.group(tiny_model, store, count=6)
    samples = [
        msgspec.structs.replace(
            sample, temperature=0.5 + i % 2, group_id="g" if shares_group else ""
        )
        for i, sample in enumerate(samples)
    ]
    packs = pack(samples, 1, load_family(tiny_model), WIDE)
    temperature_of = {sample.trace_id: sample.temperature for sample in samples}
    for packed in packs:
        assert {temperature_of[o.trace_id] for o in packed.origins} == {packed.temperature}
    assert sorted(packed.temperature for packed in packs) == [0.5, 1.5]
