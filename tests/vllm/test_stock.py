"""A vLLM that is not ours: our ids against those that it expands, and samples without proof."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import making
import msgspec
import numpy as np
import pytest
import vllm_servers
from serving import Reference

from sightline.errors import EngineError, MediaError
from sightline.inference.server_spec import ServerSpec
from sightline.inference.stock_vllm.client import StockVLLMClient, collapse_pads
from sightline.inference.vllm_plugin.command import build_vllm_environ
from sightline.launch.processes import reserve_port
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.run import RunDir
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.feed import BatchPreparer
from sightline.view.events import by_step, read_events
from sightline.wire.generate import GenerateRequest, GenerateResponse, SamplingParams
from sightline.wire.sample import Batch
from tests.loop.jobs import ROOT, sightline, summary

START_S = 600


@pytest.fixture(scope="module")
def address(
    tiny_model: Path, media: MediaStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """vLLM as it comes: none of our plugin's parts, but what its documentation names."""
    folder = tmp_path_factory.mktemp("stock")
    port = reserve_port("127.0.0.1", 0, "port")
    words = [os.path.abspath(vllm_servers.python), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(tiny_model), "--port", str(port), "--host", "127.0.0.1"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    words += ["--limit-mm-per-prompt", '{"image": 4, "video": 0}']
    words += ["--allowed-local-media-path", str(media.root)]
    settings = ServerSpec.of(path=tiny_model, media_roots=(media.root,), port=port)
    variables = build_vllm_environ("auto", 1) | {
        "VLLM_PLUGINS": "none",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=variables)
    server = vllm_servers.Server(settings, process, folder)
    try:
        server.wait("/version", "version")
        # As a run does that has it adopt its weights; before, it names its weights "default".
        server.call("POST", "/update_weight_version", {"new_version": "0"})
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def ask(client: StockVLLMClient, request: GenerateRequest) -> GenerateResponse:
    async def main() -> GenerateResponse:
        try:
            return await client.generate(request)
        finally:
            await client.close()

    return asyncio.run(main())


def stock(
    address: str, media: MediaStore, reference: Reference, shares_store: bool
) -> StockVLLMClient:
    banned_token_ids = reference.renderer.pad_token_ids
    return StockVLLMClient(
        address,
        deadline_s=5,
        store=media,
        banned_token_ids=banned_token_ids,
        shares_store=shares_store,
    )


def request_of(reference: Reference, media: MediaStore, seed: int = 3) -> GenerateRequest:
    rng = random.Random(6000)
    refs = [media.put(making.image(rng, 32 * (2 + i), 64)) for i in range(2)]
    rendered = reference.renderer.render([user("What is", refs[0], "and", refs[1], "?")])
    return GenerateRequest.of(
        rendered.token_ids, rendered.slots, SamplingParams(max_tokens=12, seed=seed)
    )


@pytest.mark.parametrize("shares_store", [True, False], ids=["files", "data urls"])
def test_its_ids_are_ours_and_its_logprobs_are_close(
    address: str, reference: Reference, media: MediaStore, shares_store: bool
) -> None:
    """The images fit the grid as they are, so that its processor does not resize them."""
    request = request_of(reference, media)
    answer = ask(stock(address, media, reference, shares_store), request)
    assert answer.sightline is None
    choice = answer.choices[0]
    assert choice.logprobs is not None
    said = choice.token_ids
    expected = reference.logprobs(request.token_ids, said, request.slots())
    found = [entry.logprob for entry in choice.logprobs.content]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert set(said).isdisjoint(reference.renderer.pad_token_ids)


def test_other_ids_are_an_error_that_shows_both(
    address: str, reference: Reference, media: MediaStore
) -> None:
    request = request_of(reference, media)
    slots = request.slots()
    # A renderer with other pixel limits would have given the first image fewer pads.
    shorter = msgspec.structs.replace(slots[0], length=slots[0].length - 1)
    tokens = [*request.token_ids[: shorter.end], *request.token_ids[slots[0].end :]]
    moved = [shorter, *(slot.shift(-1) for slot in slots[1:])]
    wrong = GenerateRequest.of(tokens, moved, request.sampling_params)
    with pytest.raises(EngineError, match="expanded the prompt differently") as caught:
        ask(stock(address, media, reference, True), wrong)
    assert str(len(tokens)) in caught.value.problem
    assert str(len(request.token_ids)) in caught.value.problem
    assert caught.value.kind == "expansion"


def test_one_pad_stands_for_each_image(reference: Reference, media: MediaStore) -> None:
    request = request_of(reference, media)
    slots = request.slots()
    short = collapse_pads(request.token_ids, slots)
    pads = [token for token in short if token in reference.family.slot_token_ids]
    assert len(pads) == len(slots) == 2
    assert len(short) == len(request.token_ids) - sum(slot.length - 1 for slot in slots)


def test_samples_without_proof_are_counted_and_refused_unless_allowed(
    tiny_model: Path, store: MediaStore
) -> None:
    family = making.family(tiny_model)
    samples = [
        msgspec.structs.replace(
            sample,
            slots=[msgspec.structs.replace(slot, pixel_digest=None) for slot in sample.slots],
        )
        for sample in making.samples(tiny_model, store, count=6)
    ]
    unproven = sum(bool(sample.slots) for sample in samples)
    assert unproven

    def prepare(budget: float, allowed: bool) -> object:
        materializer = Materializer(family, store, 1 << 24)
        limit = PackSize(1 << 20, 1 << 20)
        preparer = BatchPreparer(
            family, materializer, limit, BadMediaPolicy("drop_sample", budget, allowed)
        )
        return preparer.prepare(Batch(1, samples), "")

    with pytest.raises(MediaError, match="allow_unverified_pixels"):
        prepare(0.0, False)
    assert prepare(1.0, False).bad == {"PixelsUnproven": unproven}  # type: ignore[attr-defined]
    assert prepare(0.0, True).bad == {}  # type: ignore[attr-defined]


RUN = """
[run]
name = "stock"
steps = 3
[model]
path = "MODEL"
[env]
name = "vowels:Vowels"
[media]
root = "MEDIA"
allow_unverified_pixels = true
[rollout]
max_tokens = 8
[orchestrator]
groups_per_step = 2
group_size = 4
[trainer]
lr = 2e-3
[eval]
tasks = 0
[inference]
engine = "stock_vllm"
servers = ["ADDRESS"]
max_model_len = 512
"""


def test_a_run_samples_from_it_and_gives_it_weights(
    address: str, tiny_model: Path, media: MediaStore, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "loop" / "vowels.py", tmp_path)
    words = {"MODEL": str(tiny_model), "MEDIA": str(media.root), "ADDRESS": address}
    text = RUN
    for word, value in words.items():
        text = text.replace(word, value)
    (tmp_path / "run.toml").write_text(text)
    refused = sightline(
        "rl",
        "--plain",
        "run.toml",
        "media.allow_unverified_pixels=false",
        cwd=tmp_path,
        check=False,
    )
    assert refused.returncode == 2
    assert "no sample with an image would train" in refused.stderr
    sightline("rl", "--plain", "run.toml", cwd=tmp_path)
    run_dir = RunDir(tmp_path / "runs" / "stock-001")
    found = summary(run_dir)
    assert found["steps"] == 3
    # The trainer, with the weights of each version, gives the tokens the probabilities that vLLM
    # gave them: it has adopted every one.
    assert found["mismatch_kl"] < 1e-6
    steps = by_step(read_events(run_dir.metrics), "train")
    shown = [steps[step].values["unproven"] for step in (1, 2, 3)]
    assert all(count > 0 for count in shown), "samples without proof are counted"
    with urllib.request.urlopen(address + "/weight_info", timeout=30) as answer:
        assert json.loads(answer.read())["weight_version"].startswith("3-")
