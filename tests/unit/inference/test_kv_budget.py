"""A limited number of KV cache pages: cached rows are evicted, and requests wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from unit.inference.test_shared_prompts import ask, build

from sightline.errors import ConfigError
from sightline.families import load_family
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.torch_engine.kv_cache import BLOCK_SIZE, KVCache
from sightline.inference.torch_engine.row_table import StepPlan, TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams


class CountedPages(KVCache):
    most = 0

    def reserve(self, plan: StepPlan) -> None:
        super().reserve(plan)
        self.most = max(self.most, len(self._num_users) - len(self._free))


def limit_pages(engine: TorchEngine, num_pages: int, token_bytes: int) -> CountedPages:
    size = num_pages * BLOCK_SIZE * token_bytes
    kv = CountedPages(8, 256, torch.device("cpu"), torch.float32, max_bytes=size)
    engine.runner.use_kv_cache(kv)
    return kv


def make(first: int, length: int = BLOCK_SIZE) -> TorchRequest:
    prompt = (np.arange(length, dtype=np.int32) + first) % 250
    return TorchRequest(prompt, [], [], SamplingParams(max_tokens=8), seed=first)


def test_request_without_free_pages_waits_and_oversized_one_is_refused(
    tiny_model: Path, store: MediaStore
) -> None:
    free, tight = (build(tiny_model, store, True, True) for _ in range(2))
    waves = [[[make(10 * wave + i) for i in range(5)] for wave in range(2)] for _ in range(2)]
    ask(free, waves[0])
    kv = limit_pages(tight, 3, free.runner.kv.token_bytes)
    long = make(99, length=3 * BLOCK_SIZE)
    ask(tight, [waves[1][0], [long], waves[1][1]])
    for one, other in zip(*([*first, *second] for first, second in waves), strict=True):
        assert one.error is None and other.error is None
        assert one.tokens == other.tokens
    # Each needs two of three pages: they run one after the other, and a cached row gives its pages
    # to the next one.
    assert kv.max_pages == 3 and kv.most == 2
    assert free.counters.rows_evicted == 2 and tight.counters.rows_evicted == 9
    assert long.error is not None and "a sequence of 200 tokens" in str(long.error)


def test_sequences_beyond_the_memory_are_refused(tiny_model: Path, media: MediaStore) -> None:
    spec = ServerSpec.of(
        path=tiny_model, media_roots=(media.root,), device="cpu", max_model_len=10**13
    )
    family = load_family(tiny_model)
    with pytest.raises(ConfigError, match="no memory for 256 x 10000000000000 tokens"):
        build_engine(spec, family, Materializer(family, media, 1 << 20), ())
