"""Parts of the engine's busy seconds: prefill, decode, the vision tower, and new weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from agents import picture

from sightline.compute.weights import write_weights
from sightline.families import load_family, load_renderer
from sightline.inference.engine import JOIN_GAP_S, BusyIntervals
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.row_table import TorchRequest
from sightline.media import MediaStore
from sightline.message import user
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

PARTS = tuple(f"busy_{part}_seconds" for part in ("prefill", "decode", "vision", "adopt"))


def test_busy_parts_add_up_to_busy_seconds(
    tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    family = load_family(tiny_model)
    renderer = load_renderer(tiny_model, store, family)
    spec = ServerSpec.of(
        path=tiny_model, media_roots=(store.root,), device="cpu", max_model_len=512
    )
    engine = build_engine(
        spec, family, Materializer(family, store, 1 << 20), renderer.pad_token_ids
    )
    rendered_prompt = renderer.render([user("what?", store.put(picture(0)))])
    done = threading.Semaphore(0)
    engine.start(lambda finished: done.release())
    intervals = []
    try:
        for rendered in (renderer.render([user("words")]), rendered_prompt):
            keys = [slot.item.key for slot in rendered.slots]
            prompt = np.array(rendered.token_ids, dtype=np.int32)
            params = SamplingParams(max_tokens=8)
            engine.submit([TorchRequest(prompt, rendered.slots, keys, params, seed=0)])
            assert done.acquire(timeout=60)
            intervals.append(engine.totals())
        model = engine.runner.forward.model
        path, _ = write_weights(tmp_path, dict(model.named_parameters()), 1, 0)
        engine.adopt(path)
    finally:
        engine.stop()
        engine.join(20)
    intervals.append(engine.totals())
    text, image, adopted = ([totals[name] for name in PARTS] for totals in intervals)
    assert text[0] > 0 and text[1] > 0 and text[2:] == [0, 0]
    assert image[2] > 0 and image[3] == 0 < adopted[3]
    assert sum(adopted) == pytest.approx(intervals[-1]["busy_seconds"])


def test_only_short_gaps_are_bridged() -> None:
    busy = BusyIntervals()
    now = time.time()
    busy.add(now - 0.001)
    busy.add(time.time())
    time.sleep(2 * JOIN_GAP_S)
    busy.add(time.time())
    first, second = busy.since(0.0)
    assert first[0] == now - 0.001 and second[0] - first[1] > JOIN_GAP_S
    assert busy.since(first[1]) == [second]
