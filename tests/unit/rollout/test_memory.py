"""A rollout's memory is its tokens, a few bytes each, and its references: never its pixels."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from sightline.envs.conversation import Window, last_images, last_turns
from sightline.families import load_renderer
from sightline.media import MediaRef, MediaStore
from sightline.message import Message, user
from sightline.render import Renderer
from sightline.trace import PolicySpan, Trace, encode_trace

TURNS = (10, 20, 40)
SIZE = (320, 192)


@dataclass(frozen=True)
class Figures:
    num_tokens: int
    saved: int
    """Bytes of the trace on disk."""
    held: int
    """Bytes that the process holds for it between two turns."""
    peak: int
    """The most that it held while turns were made."""


def cut(history: Sequence[Message]) -> list[Message]:
    return last_images(2)(last_turns(6)(history))


def play(trace: Trace, pages: list[MediaRef], renderer: Renderer, window: Window | None) -> None:
    rng, history = random.Random(0), list[Message]()
    leaf = -1
    for turn, page in enumerate(pages):
        new = [user(f"page {turn} of many ", page)]
        history += new
        if window is None:
            asked = trace.extend(leaf, new, renderer)
        else:
            asked = trace.prepare(window(history), renderer)
        said = [*rng.choices(range(90), k=30), renderer.stop_token_ids[0]]
        spans = [PolicySpan(0, len(said), version=0, epoch=0)]
        node = asked.commit(said, [-1.0] * len(said), spans, "stop", ["d" * 32] * len(asked.slots))
        leaf = node.id
        history.append(node.message)


def measure(pages: list[MediaRef], renderer: Renderer, window: Window | None) -> Figures:
    gc.collect()
    tracemalloc.start()
    try:
        trace = Trace(id="t")
        play(trace, pages, renderer, window)
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Figures(trace.num_tokens, len(encode_trace(trace)), held, peak)


@pytest.mark.parametrize("window", [None, cut], ids=["all shown", "window"])
def test_the_memory_of_a_rollout_is_linear_in_its_tokens(
    tiny_model: Path, store: MediaStore, window: Window | None
) -> None:
    renderer = load_renderer(tiny_model, store)
    pages = [store.put(Image.new("RGB", SIZE, (turn, 0, 7))) for turn in range(TURNS[-1])]
    measure(pages, renderer, window)  # what is kept once for all rollouts
    figures = [measure(pages[:turns], renderer, window) for turns in TURNS]
    for name in ("saved", "held", "peak"):
        sizes = [getattr(f, name) for f in figures]
        # What each further token costs, from one length to the next: the same at every length.
        slopes = [
            (big - small) / (b.num_tokens - a.num_tokens)
            for small, big, a, b in zip(sizes, sizes[1:], figures, figures[1:], strict=False)
        ]
        print(f"{name}: {[round(s / 1e3) for s in sizes]} KB, {[round(s, 1) for s in slopes]} B")
        assert max(slopes) <= 1.1 * min(slopes), name
    longest = figures[-1]
    assert longest.saved < 16 * longest.num_tokens
    assert longest.held < 100 * longest.num_tokens
    # A pixel has three bytes, decoded; all of them would be many times what is held.
    assert longest.peak < 0.25 * TURNS[-1] * SIZE[0] * SIZE[1] * 3
