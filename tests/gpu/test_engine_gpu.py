"""The embedded engine on a GPU gives the same tokens as transformers on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import Client, Reference, Together, live, next_turn

from sightline.compute.weights import write_weights
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import Message, text, user
from sightline.wire.generate import SamplingParams

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-4


@pytest.fixture(params=["qwen3_vl", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One that attends in every layer, and one that also carries states."""
    path = tmp_path / "model"
    write_tiny("qwen_vl", path, seed=0, type=request.param)
    return path


@pytest.fixture
def client(model: Path, store: MediaStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=model,
        media_roots=(store.root,),
        device="cuda",
        max_num_seqs=32,
        prefill_chunk_tokens=16,
        weights_root="/",
    )
    with live(settings) as live_client:
        yield live_client


def test_turns_with_images_agree_with_the_cpu(
    client: Client, model: Path, store: MediaStore, tmp_path: Path
) -> None:
    reference = Reference(model, store)
    together = Together(client)
    talks = []
    for i, size in enumerate(((32, 32), (64, 96), (128, 64))):
        ref = store.put(Image.new("RGB", size, (70 * i, 10, 200)))
        rendered = reference.renderer.render([user("What is it?", ref)])
        talks.append((list(rendered.token_ids), list(rendered.slots)))
    for turn in range(3):
        if turn == 2:
            manifest, _ = write_weights(
                tmp_path / "weights", dict(reference.model.named_parameters()), 1, 1
            )
            assert client.adopt(manifest)["version"] == "1"
        params = SamplingParams(max_tokens=12, temperature=0.0 if turn else 1.0, seed=turn)
        answers = [together.generate(*talk, params) for talk in talks]
        for i, (tokens, slots) in enumerate(talks):
            choice = answers[i].result().choices[0]
            assert choice.logprobs is not None
            expected = reference.logprobs(tokens, choice.token_ids, slots)
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE)
            if turn:
                assert choice.token_ids == reference.greedy(tokens, slots, 12)
            # Use a tool message: after a user's question, some formats drop earlier reasoning.
            more = Message("tool", text("And now?"))
            talks[i] = next_turn(reference.renderer, tokens, slots, choice.token_ids[:-1], more)
    # Graphs carry the decoding, where rows have no state of their own.
    carries_state = reference.family.packing.carries_state
    assert (client.totals()["steps_replayed"] > 0) != carries_state
