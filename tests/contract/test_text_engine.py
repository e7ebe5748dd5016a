"""Text-only checkpoints on every engine: the trainer's logprobs over turns and over an update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest
import torch
import vllm_servers
from PIL import Image
from serving import Client, live, next_turn
from shards import take_first

from sightline.compute.lora_weights import digest_tensors
from sightline.compute.weights import write_weights
from sightline.families.registry import load_renderer, write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.render import Rendered
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire.generate import AdoptRequest, GenerateRequest, SamplingParams
from sightline.wire.sample import Batch
from sightline.wire.weights import Adapter

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen_vl", {"type": "qwen3"}),
    "qwen3_moe": ("qwen_vl", {"type": "qwen3_moe"}),
    "llama": ("llama3", {"tied": True}),
    "generic": ("anyvlm", {"type": "llama"}),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A vLLM server takes a minute to start, so CI tries the first kind only.
    if vllm_servers.python and request.param not in take_first(list(KINDS), 1):
        pytest.skip("left to `make full`")
    family, options = KINDS[request.param]
    path = tmp_path_factory.mktemp("models") / str(request.param)
    write_tiny(family, path, seed=0, **options)
    return path


@pytest.fixture(scope="module")
def client(model: Path, media: MediaStore) -> Iterator[Client]:
    settings = ServerSpec.of(
        path=model,
        media_roots=(media.root,),
        device="cpu",
        max_num_seqs=8,
        max_model_len=1024,
        weights_root="/",
    )
    with live(settings) as live_client:
        yield live_client


def check_turns(client: Client, learner: Learner, renderer: Any, store: MediaStore) -> None:
    """Check that three turns have the trainer's logprobs."""
    tokens = renderer.render([user("Which colour is it? " * 3)]).token_ids
    for turn in range(3):
        params = SamplingParams(max_tokens=8, seed=turn, stop_token_ids=renderer.stop_token_ids)
        choice = client.generate(tokens, [], params, rollout_id="talk").choices[0]
        assert choice.logprobs is not None
        prompt = Rendered(tokens, [], [], [])
        ours = making.trainer_logprobs(learner, store, prompt, choice.token_ids)
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_allclose(logprobs, ours, atol=TOLERANCE)
        tokens, _ = next_turn(renderer, tokens, [], choice.token_ids, user("And now?"))


def test_text_only_logprobs_match_the_trainer_before_and_after_an_update(
    client: Client, model: Path, media: MediaStore, tmp_path: Path
) -> None:
    renderer = load_renderer(model, media)
    config = making.trainer_config(lr=1e-2)
    learner = making.build_learner(making.model_config(model), config, media, steps=10)
    check_turns(client, learner, renderer, media)
    samples = making.samples(model, media, count=4)
    preparer = BatchPreparer(
        MicroBatchPixels(Materializer(learner.family, media, 0)), PackSize(1 << 20, 1 << 20)
    )
    learner.step(preparer.prepare(Batch(1, samples), ""))
    manifest, _ = making.publish(learner.forward.model, tmp_path, 1, torch.float32)
    client.adopt(manifest)
    check_turns(client, learner, renderer, media)


def test_text_only_adapter_serves_its_merged_weights(
    client: Client, model: Path, media: MediaStore, tmp_path: Path
) -> None:
    config = making.trainer_config()
    learner = making.build_learner(making.model_config(model), config, media, steps=1)
    named = {name: p.detach() for name, p in learner.forward.model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    rng = torch.Generator().manual_seed(0)
    changed = [name for name in named if name.endswith(("q_proj.weight", "down_proj.weight"))]
    still = ((name, weight) for name, weight in named.items())
    adapter = Adapter(digest_tensors(still, torch.float32), "F32", dict.fromkeys(changed, 0.5))
    for name in changed:
        rows, columns = named[name].shape
        a = torch.randn(4, columns, generator=rng) * 0.1
        b = torch.randn(rows, 4, generator=rng) * 0.1
        tensors |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
        named[name].add_(0.5 * (b @ a))
    manifest, _ = write_weights(tmp_path, tensors, 2, 2, adapter=adapter)
    if client.engine == "vllm" and model.name == "qwen3_moe":  # its files hold each expert apart
        body = msgspec.json.encode(AdoptRequest(str(manifest)))
        error = client.refused(body, "/sightline/v1/adopt")
        assert "accepts no adapters" in error.message
        return
    client.adopt(manifest)
    check_turns(client, learner, load_renderer(model, media), media)


def test_a_text_only_checkpoint_refuses_an_image_by_path(
    client: Client, tiny_model: Path, media: MediaStore
) -> None:
    rendered = load_renderer(tiny_model, media).render(
        [user(media.put(Image.new("RGB", (32, 32))))]
    )
    request = GenerateRequest.of(
        [1] * len(rendered.token_ids), rendered.slots, SamplingParams(8), "image"
    )
    error = client.refused(msgspec.json.encode(request))
    assert error.type == "slots"
    assert error.message.startswith("features: this checkpoint accepts no media")
