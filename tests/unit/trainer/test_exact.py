"""`[model] exact = true` detects one bit of difference, for each cause alone."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import exactness
import making
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exactness import Passes
from serving import embedded

from sightline.compute import exact
from sightline.compute.model import load_model
from sightline.compute.weights import write_weights
from sightline.config import RunFile
from sightline.config.load import validate_config
from sightline.errors import ConfigError, PolicyMismatch
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.trainer.learner import SUM_NAMES
from sightline.trainer.step_result import MetricSums, check_same_bits, sum_mismatch

BOTH = pytest.mark.parametrize("is_exact", [True, False])
WHOLE = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "model"
    write_tiny("qwen_vl", path, seed=0, kv_heads=1)  # two heads share their keys
    return path


@cache
def passes(model: Path, is_exact: bool, length: int = 150) -> Passes:
    return Passes(model, is_exact, length=length)


# --- each cause of difference alone: with exact off, every one of these sees it


@BOTH
def test_packing_is_exact(model: Path, is_exact: bool) -> None:
    is_same = []
    for length in (1, 5, 150):
        outputs = passes(model, is_exact, length)
        alone = outputs.train()
        packed = [outputs.train(before, after) for before, after in ((3, 0), (64, 77), (1, 700))]
        is_same += [torch.equal(alone, one) for one in packed]
    assert all(is_same) == is_exact


@BOTH
@pytest.mark.parametrize("chunks", [[1] * 9 + [141], [7, 64, 13, 66]])
def test_chunked_prefill_is_exact(model: Path, is_exact: bool, chunks: list[int]) -> None:
    outputs = passes(model, is_exact)
    in_chunks = outputs.prefill(outputs.open(), chunks)
    assert torch.equal(outputs.train(), in_chunks) == is_exact


@BOTH
def test_batch_size_does_not_change_logprobs(model: Path, is_exact: bool) -> None:
    outputs = passes(model, is_exact)
    wanted = outputs.train()[-12:]
    beside = outputs.prefill(outputs.open(), [140, 10], beside=4)[-12:]
    kv = outputs.open()
    outputs.prefill(kv, [138])
    decoded = [outputs.decode(kv, 138, idle) for idle in (0, 3)]
    assert all(torch.equal(wanted, one) for one in (beside, *decoded)) == is_exact


@BOTH
def test_reused_keys_and_values_are_exact(model: Path, is_exact: bool) -> None:
    outputs = passes(model, is_exact)
    kv = outputs.open()
    outputs.prefill(kv, [100, 50])
    kv.share_prefix(0, 1, 97)
    rest = outputs.prefill(kv, [20, 33], row=1, start=97)
    assert torch.equal(outputs.train()[97:], rest) == is_exact


def test_exact_mode_does_not_pack_trees(model: Path, store: MediaStore) -> None:
    outputs = passes(model, False)
    assert not torch.equal(outputs.train(), outputs.train_in_tree(shared=70))
    family = load_family(model, True)
    assert family.packing.kind == "flat" and "exact" in family.packing.description
    learner = making.build_learner(
        making.model_config(model, exact=True), making.trainer_config(), store, steps=1
    )
    samples = making.group(model, store, count=4)
    ready = exactness.prepare(learner, model, store, samples, WHOLE, step=1)
    num_tokens = sum(len(micro_batch.batch.token_ids) for micro_batch in ready.micro_batches)
    assert num_tokens == sum(len(sample.token_ids) for sample in samples)


# --- engine and trainer


@BOTH
@pytest.mark.parametrize("kind", ["images", "text"])
def test_logprobs_equal_the_samplers(
    model: Path, store: MediaStore, tmp_path: Path, is_exact: bool, kind: str
) -> None:
    """Turns, groups that share their prompt, and an update between two turns.

    The text is for a model of the generic family.
    """
    if kind == "text":
        model = tmp_path / "text"
        write_tiny("anyvlm", model, type="llama")
    settings = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", max_num_seqs=6,
        prefill_chunk_tokens=13, weights_root="/", exact=is_exact,
    )  # fmt: skip
    config = making.model_config(model, exact=is_exact)
    learner = making.build_learner(config, making.trainer_config(), store, steps=10)
    parameters = dict(learner.forward.model.named_parameters())
    updated = {name: p.detach() * 1.01 for name, p in parameters.items()}
    manifest, _ = write_weights(tmp_path / "weights", updated, 1, 1)
    with embedded(settings) as client:
        samples = exactness.play(
            client, model, store, groups=2, group_size=2, turns=2, max_tokens=8,
            between_turns=lambda turn: turn or client.adopt(manifest),
        )  # fmt: skip
    differing = 0
    for step in (1, 2):
        for tokens in (WHOLE, 1):
            ready = exactness.prepare(learner, model, store, samples, tokens, step)
            sampler, trainer = exactness.compare(learner, ready)
            assert len(sampler) > 20
            np.testing.assert_allclose(sampler, trainer, atol=1e-5)
            differing += int((sampler != trainer).sum())
        if step == 1:
            for name, tensor in updated.items():
                parameters[name].data.copy_(tensor)
    assert (differing == 0) == is_exact
    if is_exact:
        metrics = learner.step(ready).metrics
        assert metrics["mismatch_kl"] == 0 and metrics["fresh_tokens"]


def test_mismatch_is_0_while_float32_masters_move_bfloat16_weights(
    model: Path, store: MediaStore, tmp_path: Path
) -> None:
    """Play, train and publish at a learning rate that bfloat16 weights would round away."""
    settings = ServerSpec.of(
        path=model, media_roots=(store.root,), device="cpu", dtype="bfloat16", max_num_seqs=6,
        prefill_chunk_tokens=13, weights_root="/", exact=True,
    )  # fmt: skip
    config = making.model_config(model, dtype="bfloat16", exact=True)
    learner = making.build_learner(config, making.trainer_config(lr=3e-6), store, steps=10)
    before = {n: p.detach().clone() for n, p in learner.forward.model.named_parameters()}
    with embedded(settings) as client:
        for step in range(1, 4):
            samples = exactness.play(
                client, model, store, groups=1, group_size=2, turns=2, max_tokens=8
            )
            ready = exactness.prepare(learner, model, store, samples, 150, step)
            metrics = learner.step(ready).metrics
            assert metrics["mismatch_kl"] == 0 and metrics["fresh_tokens"]
            path, _ = making.publish(learner.forward.model, tmp_path / "w", step, torch.bfloat16)
            client.adopt(path)
    after = dict(learner.forward.model.named_parameters())
    assert all(not torch.equal(after[name], was) for name, was in before.items() if was.ndim > 1)


def test_exact_gradients_match_the_default_mode(model: Path, store: MediaStore) -> None:
    samples = making.samples(model, store, count=3)
    gradients = []
    for is_exact in (True, False):
        config = making.model_config(model, exact=is_exact)
        learner = making.build_learner(config, making.trainer_config(), store, steps=1)
        ready = exactness.prepare(learner, model, store, samples, WHOLE, step=1)
        for micro_batch in ready.micro_batches:
            learner.backward(micro_batch, MetricSums(SUM_NAMES))
        grads = {n: p.grad for n, p in learner.forward.model.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        gradients.append(grads)
    floor = 1e-3 * max(float(g.norm()) for g in gradients[1].values())
    for name, wanted in gradients[1].items():
        difference = float((gradients[0][name] - wanted).norm()) / max(float(wanted.norm()), floor)
        assert difference < 1e-4, f"{name}: {difference}"


# --- ends of a run


def scored(model: Path, store: MediaStore) -> Any:
    learner = making.build_learner(
        making.model_config(model), making.trainer_config(), store, steps=1
    )
    samples = making.samples(model, store, count=2)
    ready = exactness.prepare(learner, model, store, samples, WHOLE, step=1)
    return ready.micro_batches[0].batch


def test_one_differing_bit_ends_the_run(model: Path, store: MediaStore) -> None:
    batch = scored(model, store)
    logprobs = batch.logprobs.numpy().copy()
    check_same_bits(1, [(batch, logprobs)])
    at = len(logprobs) - 1
    was, logprobs[at] = logprobs[at], np.nextafter(logprobs[at], np.float32(0))
    with pytest.raises(PolicyMismatch) as raised:
        check_same_bits(1, [(batch, logprobs)])
    origin = batch.origins[-1]
    token = int(batch.token_ids.numpy()[batch.trained.numpy()[at]])
    for word in (f"token {token}", f"rollout {origin.trace_id}", repr(was), repr(logprobs[at])):
        assert word in raised.value.problem
    check_same_bits(2, [(batch, logprobs)])  # another version sampled it
    logprobs[at] = np.nan
    with pytest.raises(PolicyMismatch):
        check_same_bits(1, [(batch, logprobs)])


def test_mismatch_is_summed_apart_for_the_current_version(model: Path, store: MediaStore) -> None:
    batch = scored(model, store)
    sampler = batch.logprobs.numpy()
    mismatch = sum_mismatch(1, [(batch, sampler + np.float32(0.1))] * 2)
    num = 2 * len(sampler)
    assert (mismatch["tokens"], mismatch["fresh_tokens"], mismatch["older_tokens"]) == (num, num, 0)
    kl = np.expm1(0.1) - 0.1
    assert mismatch["fresh_kl"] == pytest.approx(num * kl, rel=1e-4) and mismatch["older_kl"] == 0
    assert sum_mismatch(2, [(batch, sampler.copy())])["older_tokens"] == len(sampler)


def test_batch_dependent_matmul_is_refused_with_its_shape(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "multiply", lambda x, w, b, least, most: F.linear(x, w, b))
    with pytest.raises(ConfigError, match=r"\(\d+ x \d+\) has different bits among \d+ rows"):
        load_model(model, load_family(model), "cpu", "float32", ("cpu", "float32"))


def test_batch_dependent_attention_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: Any, q: Any, k: Any, v: Any, scaling: float) -> Any:
        return q + q.mean()

    monkeypatch.setattr(exact.ExactPattern, "_attend", attend)
    with pytest.raises(ConfigError, match="change when 3 and 77 others surround them"):
        load_model(model, load_family(model), "cpu", "float32", ("cpu", "float32"))


def test_exact_is_refused_for_generic_models_with_images(tmp_path: Path) -> None:
    write_tiny("anyvlm", tmp_path / "model")
    with pytest.raises(ConfigError, match="images in the generic family"):
        load_family(tmp_path / "model", True)


@pytest.mark.parametrize(
    ("type", "device", "why"),
    [
        ("qwen3_vl", "cuda", "float32 on cuda"),
        ("qwen3_vl_moe", "cpu", "several matrices"),
        ("qwen3_5", "cpu", "carry a state"),
    ],
)
def test_models_without_exact_support_are_refused(
    type: str, device: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    write_tiny("qwen_vl", path, seed=0, type=type)
    with pytest.raises(ConfigError, match=why):
        load_model(path, load_family(path, True), "cpu", "float32", (device, "float32"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"inference": {"keep_kv_over_updates": True}}, "KV cache of old weights"),
        ({"inference": {"device": "cpu"}, "trainer": {"device": "cuda:0"}}, "round differently"),
        ({"lora": {"rank": 4}}, "not computed in exact"),
    ],
)
def test_settings_incompatible_with_exact_mode_are_refused(
    settings: dict[str, Any], why: str
) -> None:
    file = {"model": {"path": "m", "exact": True}, "env": {"name": "color_codeword"}}
    validate_config(RunFile, file, "a run file")
    with pytest.raises(ConfigError, match=why):
        validate_config(RunFile, {**file, **settings}, "a run file")


def test_exactness_is_not_required_of_replayed_batches(model: Path, store: MediaStore) -> None:
    config = making.model_config(model, exact=True)
    learner = making.build_learner(config, making.trainer_config(), store, steps=9)
    samples = making.samples(model, store, count=1)
    ready = exactness.prepare(learner, model, store, samples, WHOLE, step=1)
    with pytest.raises(PolicyMismatch):
        learner.step(ready)
    learner.replayed = range(1, 2)
    assert learner.step(ready).metrics["mismatch_kl"]


def test_convolution_over_single_patches_equals_a_matmul() -> None:
    patches = torch.randn(70, 3, 2, 4, 4)
    module = torch.nn.Conv3d(3, 24, (2, 4, 4), stride=(2, 4, 4))
    product = partial(exact._multiply_with_gradient, least=exact.ROWS, most=exact.ROWS)
    compute = partial(exact.embed_patches, module, module.forward, product)
    plain = module(patches)
    plain.square().sum().backward()
    wanted = [module.weight.grad.clone(), module.bias.grad.clone()]
    module.zero_grad()
    features = compute(patches)
    features.square().sum().backward()
    torch.testing.assert_close(features, plain)
    torch.testing.assert_close([module.weight.grad, module.bias.grad], wanted, atol=1e-3, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(compute(patches[5:6]), features[5:6])
        wide = torch.randn(1, 3, 2, 8, 8)  # several patches a row go the way of the module
        assert torch.equal(compute(wide), module(wide))
