"""Models with their own attention: the engine caches nothing and computes whole rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import Together, live

from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec, describe_prefix_reuse
from sightline.inference.torch_engine.model_runner import MAX_PADDED_TOKENS, group_rows
from sightline.media import MediaStore
from sightline.message import user
from sightline.wire.generate import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "gemma3"
    write_tiny("anyvlm", path, seed=0, type="gemma3")
    return path


def test_forward_pass_batches_rows_of_similar_padded_length() -> None:
    lengths = np.array([9000, 10, 4000, 30_000, 12, 5000])
    groups = list(group_rows(lengths))
    assert sorted(np.concatenate(groups).tolist()) == list(range(6))
    assert [lengths[group].tolist() for group in groups] == [
        [30_000],
        [9000],
        [5000, 4000, 12],
        [10],
    ]
    assert all(len(g) == 1 or len(g) * lengths[g].max() <= MAX_PADDED_TOKENS for g in groups)


def test_batched_rows_match_separate_rows(model: Path, store: MediaStore) -> None:
    """Rows of several lengths, with images and without."""
    family = load_family(model)
    assert "off" in describe_prefix_reuse(family)
    renderer = load_renderer(model, store, family)
    ref = store.put(Image.new("RGB", (40, 30), (200, 10, 10)))
    prompts = [renderer.render([user("how? " * n, *([ref] * (n % 2)))]) for n in range(1, 7)]
    settings = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", max_num_seqs=8, max_model_len=256,
        prefill_chunk_tokens=8,
    )  # fmt: skip
    params = SamplingParams(max_tokens=6, seed=1)
    with live(settings) as client:
        alone = [client.generate(p.token_ids, p.slots, params) for p in prompts]
        together = Together(client)
        answers = [together.generate(p.token_ids, p.slots, params) for p in prompts]
        for one, other in zip(alone, answers, strict=True):
            choice, again = one.choices[0], other.result().choices[0]
            assert again.token_ids == choice.token_ids
            assert choice.logprobs is not None and again.logprobs is not None
            logprobs = [[e.logprob for e in c.logprobs.content] for c in (choice, again)]
            np.testing.assert_allclose(*logprobs, atol=1e-5)
        assert client.totals()["cached_tokens"] == 0
        assert client.now()["kv_bytes"] == 0
