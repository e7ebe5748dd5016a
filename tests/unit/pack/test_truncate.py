"""Truncation cuts no image, and the rest stays aligned."""

from __future__ import annotations

import random
from pathlib import Path

import making
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import num_examples

from sightline.families import load_family, load_renderer
from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.pack import PackSize, pack, truncate
from sightline.pack.truncate import CUT, FIRST_IMAGE, NOTHING_TRAINS
from sightline.trainer.alignment_checks import check_micro_batch
from sightline.trainer.sft import build_sample


@settings(
    max_examples=num_examples(60, 25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 50), limit=st.integers(1, 120))
def test_truncated_sample_is_aligned_and_holds_whole_images(
    tiny_model: Path, store: MediaStore, seed: int, limit: int
) -> None:
    samples = making.samples(tiny_model, store, count=3, seed=seed)
    truncated, counts = truncate(samples, limit)
    family, renderer = load_family(tiny_model), load_renderer(tiny_model, store)
    before = {sample.trace_id: sample for sample in samples}
    assert len(truncated) + counts[FIRST_IMAGE] + counts[NOTHING_TRAINS] == len(samples)
    assert counts[CUT] == sum(
        len(s.token_ids) < len(before[s.trace_id].token_ids) for s in truncated
    )
    for sample in truncated:
        whole = before[sample.trace_id]
        num, num_trained = len(sample.token_ids), len(sample.trained)
        assert num <= limit and num_trained > 0
        assert np.array_equal(sample.token_ids.numpy(), whole.token_ids.numpy()[:num])
        for name in ("trained", "logprobs", "advantages", "versions"):
            ours, theirs = getattr(sample, name).numpy(), getattr(whole, name).numpy()
            assert np.array_equal(ours, theirs[:num_trained])
        for ours, theirs in zip(sample.slots, whole.slots, strict=False):
            assert (ours.offset, ours.length) == (theirs.offset, theirs.length)
            assert sample.items[ours.item] == whole.items[theirs.item]
        assert {slot.item for slot in sample.slots} == set(range(len(sample.items)))
    for packed in pack(truncated, 1, family, PackSize(10**6, 10**6)):
        check_micro_batch(packed, family, renderer.pad_token_ids, renderer.vocab_size)


def test_every_limit_cuts_before_an_image(tiny_model: Path, store: MediaStore) -> None:
    first, second = (store.put(making.image(random.Random(i), 64, 64)) for i in (1, 2))
    talk = [user(first, "what is this"), assistant("A"), user(second, "and this"), assistant("B")]
    sample = build_sample(talk, load_renderer(tiny_model, store), "s")
    slot, two = sample.slots
    answer = sample.segments[0].stop
    for limit in range(1, len(sample.token_ids)):
        truncated, counts = truncate([sample], limit)
        if limit < slot.offset + slot.length:
            assert counts == {FIRST_IMAGE: 1}, limit
        elif limit <= sample.segments[0].start:
            assert counts == {NOTHING_TRAINS: 1}, limit
        else:
            assert counts == {CUT: 1}
            end = limit if limit > sample.segments[1].start else min(limit, answer)
            assert len(truncated[0].token_ids) == end, limit
            whole_second = end >= two.offset + two.length
            assert len(truncated[0].slots) == len(truncated[0].items) == 1 + whole_second


def test_first_image_over_the_limit_drops_the_preceding_text_too(
    tiny_model: Path, store: MediaStore
) -> None:
    image = store.put(making.image(random.Random(0), 64, 64))
    talk = [user("hello"), assistant("A"), user(image, "what"), assistant("B")]
    sample = build_sample(talk, load_renderer(tiny_model, store), "s")
    truncated, counts = truncate([sample], sample.slots[0].offset + 1)
    assert truncated == [] and counts == {FIRST_IMAGE: 1}
