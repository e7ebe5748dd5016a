"""The generate protocol, on every engine: same tokens and logprobs as transformers, versions,
images by reference, and errors that cost one request.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import vllm_servers
from PIL import Image
from serving import GREEDY, Client, Reference, Together, live, next_turn, read_seen

from sightline.compute.weights import write_weights
from sightline.errors import EngineError
from sightline.families import load_family, load_renderer
from sightline.families.registry import load_serving
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import user
from sightline.rollout.client import GenerateClient
from sightline.wire import MediaItem, Slot
from sightline.wire.generate import GenerateRequest, GenerateResponse, SamplingParams
from tests.contract.test_fuzz import undecodable

TOLERANCE = 1e-5
SIZES = ((32, 32), (64, 96), (128, 64))
Prompt = tuple[list[int], list[Slot]]


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Iterator[Client]:
    """A server that never changes its weights."""
    with live(settings) as live_client:
        yield live_client


@pytest.fixture
def fresh(settings: ServerSpec) -> Iterator[Client]:
    """A server for one test that changes its weights."""
    with live(settings) as client:
        yield client


@pytest.fixture
def odd(odd_settings: ServerSpec) -> Iterator[Client]:
    """A server without caches, with few rows and a small queue, that keeps old keys and values."""
    with live(odd_settings) as client:
        yield client


@pytest.fixture(scope="module")
def block(client: Client, reference: Reference) -> int:
    """Number of tokens in a unit of the engine's KV cache. 0 if it caches none."""
    if client.engine == "torch":
        return 1
    # On a CPU, vLLM caches no latent attention, because its kernels cannot start in the middle.
    return 0 if reference.family.name == "kimi_k25" else 32


@pytest.fixture(scope="module")
def reference(tiny_model: Path, media: MediaStore) -> Reference:
    return Reference(tiny_model, media)


@pytest.fixture(scope="module")
def prompts(reference: Reference, media: MediaStore) -> list[Prompt]:
    """Return three prompts with images of different sizes, and one without images."""
    prompts_of_turns = []
    for i, (width, height) in enumerate(SIZES):
        ref = media.put(Image.new("RGB", (width, height), (80 * i, 200, 30)))
        prompts_of_turns.append(reference.renderer.render([user("What is it?" * (i + 1), ref)]))
    prompts_of_turns.append(reference.renderer.render([user("Hello.")]))
    return [(rendered.token_ids, rendered.slots) for rendered in prompts_of_turns]


def logprobs_of(answer: GenerateResponse) -> list[float]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs.content] == answer.choices[0].token_ids
    return [entry.logprob for entry in logprobs.content]


# --- exactness


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_a_plain_forward_pass(
    client: Client, reference: Reference, prompts: list[Prompt], temperature: float
) -> None:
    together = Together(client)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    answers = [together.generate(*prompt, params) for prompt in prompts]
    for (tokens, slots), answer in zip(prompts, answers, strict=True):
        token_ids = answer.result().choices[0].token_ids
        expected = reference.logprobs(tokens, token_ids, slots, temperature)
        np.testing.assert_allclose(logprobs_of(answer.result()), expected, atol=TOLERANCE)


def test_logprobs_are_exact_over_turns_with_cached_keys_and_values(
    client: Client, reference: Reference, media: MediaStore, block: int
) -> None:
    ref = media.put(Image.new("RGB", (64, 96), (2, 7, 1)))
    rendered = reference.renderer.render([user("Which of them are kept?" * 3, ref)])
    tokens, slots = rendered.token_ids, rendered.slots
    known = 0
    for turn in range(3):
        params = SamplingParams(max_tokens=6, seed=turn)
        answer = client.generate(tokens, slots, params, rollout_id="rollout")
        assert answer.sightline is not None
        # The engine computed the last turn's prompt, and its answer except one token.
        # vLLM reuses whole blocks, or nothing.
        assert answer.sightline.cached_tokens == (known // block * block if block else 0)
        assert len(answer.sightline.pixel_digests) == len(slots)
        token_ids = answer.choices[0].token_ids
        expected = reference.logprobs(tokens, token_ids, slots)
        np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)
        known = len(tokens) + len(token_ids) - 1
        image_ref = media.put(Image.new("RGB", (64, 32 * (turn + 1)), (9, 90, 60 * turn)))
        tokens, slots = next_turn(
            reference.renderer, tokens, slots, token_ids, user("And?", image_ref)
        )


def test_greedy_decoding_matches_transformers(
    client: Client, reference: Reference, prompts: list[Prompt]
) -> None:
    together = Together(client)
    params = SamplingParams(max_tokens=16, temperature=0.0)
    answers = [together.generate(*prompt, params) for prompt in prompts]
    for (tokens, slots), answer in zip(prompts, answers, strict=True):
        assert answer.result().choices[0].token_ids == reference.greedy(tokens, slots, 16)


def test_same_tokens_with_another_image_miss_the_prefix_cache(
    client: Client, reference: Reference, media: MediaStore, block: int
) -> None:
    later: list[Prompt] = []
    for colour in ((255, 0, 0), (0, 0, 255)):
        ref = media.put(Image.new("RGB", (32, 32), colour))
        rendered = reference.renderer.render([user(ref, "Same words." * 6)])
        # After one sampled token the row holds the prompt alone, the same ids for both images.
        client.generate(rendered.token_ids, rendered.slots, SamplingParams(max_tokens=1))
        later.append(
            next_turn(reference.renderer, rendered.token_ids, rendered.slots, [65], user("More."))
        )
    (red, _), (blue, _) = later
    assert red == blue
    digests = set()
    for tokens, slots in later:
        answer = client.generate(tokens, slots)
        assert answer.sightline is not None
        assert bool(answer.sightline.cached_tokens) == bool(block)
        digests |= set(answer.sightline.pixel_digests)
        expected = reference.logprobs(tokens, answer.choices[0].token_ids, slots)
        np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)
    assert len(digests) == 2


# --- sampling


def test_seed_draws_the_same_tokens_alone_and_batched(
    client: Client, prompts: list[Prompt]
) -> None:
    params = SamplingParams(max_tokens=20, seed=11)
    alone = [client.generate(*prompt, params).choices[0].token_ids for prompt in prompts]
    together = Together(client)
    crowd = [
        together.generate(*prompt, replace_params(params, seed=seed))
        for seed in (11, 12, 13)
        for prompt in prompts
    ]
    drawn = [answer.result().choices[0].token_ids for answer in crowd]
    assert drawn[: len(prompts)] == alone
    assert drawn[len(prompts) : 2 * len(prompts)] != alone


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def test_choices_are_sampled_independently_and_the_first_as_if_alone(
    client: Client, prompts: list[Prompt]
) -> None:
    params = SamplingParams(max_tokens=10, seed=5)
    several = client.generate(*prompts[0], replace_params(params, n=3)).choices
    assert [choice.index for choice in several] == [0, 1, 2]
    assert several[0].token_ids == client.generate(*prompts[0], params).choices[0].token_ids
    assert several[1].token_ids != several[0].token_ids


def test_stop_id_ends_the_answer_and_is_included(client: Client, prompts: list[Prompt]) -> None:
    free = client.generate(*prompts[0]).choices[0]
    assert free.finish_reason == "length" and len(free.token_ids) == GREEDY.max_tokens
    stop = free.token_ids[2]
    params = replace_params(GREEDY, stop_token_ids=(stop,))
    stopped = client.generate(*prompts[0], params).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


@pytest.mark.parametrize(
    "cut", [{"top_k": 2}, {"top_p": 0.02}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.9}]
)
def test_top_k_and_top_p_renormalize_the_remaining_tokens(
    client: Client, reference: Reference, prompts: list[Prompt], cut: dict[str, Any]
) -> None:
    tokens, slots = prompts[0]
    logits = reference.logits(tokens, slots)[-1]
    logits[list(reference.renderer.pad_token_ids)] = float("-inf")
    left = expected_cut(logits.softmax(-1).numpy(), **cut)
    drawn = {}
    for seed in range(12):
        answer = client.generate(tokens, slots, SamplingParams(max_tokens=1, seed=seed, **cut))
        drawn[answer.choices[0].token_ids[0]] = logprobs_of(answer)[0]
    assert drawn.keys() <= left.keys()
    for token, logprob in drawn.items():
        assert logprob == pytest.approx(np.log(left[token]), abs=1e-4)


def expected_cut(
    probs: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Compute the filtered distribution plainly: min-p, then top-k, then top-p."""
    tokens = [int(i) for i in np.argsort(-probs) if probs[i] >= min_p * probs.max()]
    tokens = tokens[: top_k or None]
    mass = probs[tokens] / probs[tokens].sum()
    tokens = [token for i, token in enumerate(tokens) if i == 0 or mass[:i].sum() < top_p]
    return {token: float(probs[token] / probs[tokens].sum()) for token in tokens}


def test_pads_are_never_sampled_even_with_the_highest_logit(
    fresh: Client, tiny_model: Path, reference: Reference, prompts: list[Prompt], tmp_path: Path
) -> None:
    tokens, slots = prompts[0]
    pads = list(reference.renderer.pad_token_ids)
    model = Reference(tiny_model, reference.store)
    hidden = model.model.model(**model._inputs(tokens, slots)).last_hidden_state[0, -1].detach()
    with torch.no_grad():
        model.model.lm_head.weight[pads] = 10 * hidden / hidden.norm()
    assert int(model.logits(tokens, slots)[-1].argmax()) in pads
    manifest, _ = write_weights(tmp_path, dict(model.model.named_parameters()), 1, 0)
    fresh.adopt(manifest)
    sampled_ids = set()
    for seed in range(6):
        for temperature in (0.0, 1.0, 2.0):
            params = SamplingParams(max_tokens=2, temperature=temperature, seed=seed)
            answer = fresh.generate(tokens, slots, params)
            sampled_ids |= set(answer.choices[0].token_ids)
            expected = model.logprobs(tokens, answer.choices[0].token_ids, slots, temperature or 1)
            np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)
    assert sampled_ids.isdisjoint(pads)


# --- many at once


def test_late_request_is_answered_while_earlier_ones_decode(
    client: Client, prompts: list[Prompt]
) -> None:
    together = Together(client)
    before = client.totals()
    long = [
        together.generate(*prompts[i], SamplingParams(max_tokens=300, seed=i)) for i in range(2)
    ]
    client.wait_for("totals", "sampled_tokens", before["sampled_tokens"] + 20)
    for late in prompts:
        assert len(client.generate(*late, GREEDY).choices[0].token_ids) == GREEDY.max_tokens
    assert not any(answer.done() for answer in long)
    for answer in long:
        assert len(answer.result().choices[0].token_ids) == 300


def test_repeated_image_is_decoded_and_encoded_once(
    fresh: Client, settings: ServerSpec, reference: Reference, media: MediaStore
) -> None:
    rendered = reference.renderer.render([user(media.put(Image.new("RGB", (64, 64), (3, 1, 4))))])
    together = Together(fresh)
    params = SamplingParams(max_tokens=2)
    with encodings(fresh, settings, rendered.slots[0]) as num_encoded:
        answers = [together.generate(rendered.token_ids, rendered.slots, params) for _ in range(16)]
        for answer in answers:
            answer.result()
        assert fresh.totals()["images_made"] == 1
        assert num_encoded() == 1


@contextmanager
def encodings(client: Client, settings: ServerSpec, slot: Slot) -> Iterator[Callable[[], float]]:
    """Count how often the image of `slot` goes through the vision tower. vLLM does not count this,
    so a hook in its worker records the tower's inputs.
    """
    if client.engine == "torch":
        before = client.totals()["images_encoded"]
        yield lambda: client.totals()["images_encoded"] - before
        return
    folder, family = vllm_servers.start(settings).folder, load_family(settings.model.path)
    (folder / "wanted").touch()
    try:
        yield lambda: len(read_seen(folder, family)) / prod(slot.item.grid)
    finally:
        for file in (folder / "wanted", *folder.glob("seen-*.npy")):
            file.unlink()


# --- weights


def publish(
    model: Path, root: Path, version: int, vision_version: int, scale: float, reference: Reference
) -> tuple[Path, Reference]:
    """Publish `scale` times the checkpoint's weights in several files, and load the reference
    model. The vision tower changes only if `vision_version` does.
    """
    changed = Reference(model, reference.store)
    vision = load_serving(model, reference.family).vision_prefixes(reference.family)
    with torch.no_grad():
        for name, parameter in changed.model.named_parameters():
            if not name.startswith(vision) or vision_version:
                parameter.mul_(scale)
    parameters = dict(changed.model.named_parameters())
    path, manifest = write_weights(
        root, parameters, version, vision_version, max_file_bytes=1 << 18
    )
    assert len(manifest.files) > 2
    return path, changed


def test_update_during_an_answer_gives_two_version_spans(
    fresh: Client, tiny_model: Path, reference: Reference, prompts: list[Prompt], tmp_path: Path
) -> None:
    manifest, changed = publish(tiny_model, tmp_path, 7, 7, 1.2, reference)
    tokens, slots = prompts[1]
    together = Together(fresh)
    answer = together.generate(tokens, slots, SamplingParams(max_tokens=200, seed=1))
    fresh.wait_for("totals", "sampled_tokens", 20)
    assert fresh.adopt(manifest) == {"version": "7", "vision_version": 7}
    choice = answer.result().choices[0]
    assert choice.weight_versions is not None
    first, second = choice.weight_versions
    assert (first.version, second.version) == ("0", "7")
    assert first.start == 0 and first.end == second.start and second.end == 200
    logprobs = logprobs_of(answer.result())
    for span, witness in ((first, reference), (second, changed)):
        expected = witness.logprobs(tokens, choice.token_ids, slots)[span.start : span.end]
        np.testing.assert_allclose(logprobs[span.start : span.end], expected, atol=TOLERANCE)
    assert fresh.totals()["prefilled_again"] == 1
    assert fresh.get("/health")["version"] == "7"


def test_turn_after_an_update_reuses_no_old_cache(
    fresh: Client, tiny_model: Path, reference: Reference, prompts: list[Prompt], tmp_path: Path
) -> None:
    tokens, slots = prompts[2]
    token_ids = fresh.generate(tokens, slots).choices[0].token_ids
    manifest, changed = publish(tiny_model, tmp_path, 1, 1, 0.8, reference)
    fresh.adopt(manifest)
    tokens, slots = next_turn(reference.renderer, tokens, slots, token_ids, user("Again?"))
    answer = fresh.generate(tokens, slots)
    assert answer.sightline is not None and answer.sightline.cached_tokens == 0
    expected = changed.logprobs(tokens, answer.choices[0].token_ids, slots)
    np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)


def test_image_features_survive_an_update_of_text_weights_only(
    fresh: Client,
    settings: ServerSpec,
    tiny_model: Path,
    reference: Reference,
    media: MediaStore,
    tmp_path: Path,
) -> None:
    ref = media.put(Image.new("RGB", (64, 64), (2, 7, 8)))
    rendered = reference.renderer.render([user("What is it?", ref)])
    tokens, slots = rendered.token_ids, rendered.slots
    with encodings(fresh, settings, slots[0]) as num_encoded:
        fresh.generate(tokens, slots)
        images_made = fresh.totals()["images_made"]
        for version, vision_version, encoded in ((1, 0, 1), (2, 2, 2)):
            manifest, changed = publish(
                tiny_model, tmp_path, version, vision_version, 1.1, reference
            )
            fresh.adopt(manifest)
            answer = fresh.generate(tokens, slots)
            assert num_encoded() == encoded
            assert fresh.totals()["images_made"] == images_made
            expected = changed.logprobs(tokens, answer.choices[0].token_ids, slots)
            np.testing.assert_allclose(logprobs_of(answer), expected, atol=TOLERANCE)


def test_keys_and_values_can_be_kept_across_updates(
    odd: Client, tiny_model: Path, reference: Reference, prompts: list[Prompt], tmp_path: Path
) -> None:
    manifest, _ = publish(tiny_model, tmp_path, 1, 1, 1.2, reference)
    answer = Together(odd).generate(*prompts[0], SamplingParams(max_tokens=200, seed=1))
    odd.wait_for("totals", "sampled_tokens", 20)
    odd.adopt(manifest)
    spans = answer.result().choices[0].weight_versions
    assert spans is not None and len(spans) == 2
    assert odd.totals()["prefilled_again"] == 0


@pytest.mark.parametrize("fault", ["truncated", "missing", "no manifest", "shape", "name", "junk"])
def test_broken_weights_are_refused_and_old_ones_kept(
    client: Client, reference: Reference, prompts: list[Prompt], tmp_path: Path, fault: str
) -> None:
    tensors: dict[str, torch.Tensor] = dict(reference.model.named_parameters())
    name = next(iter(tensors))
    if fault == "shape":
        tensors = {**tensors, name: torch.zeros(3)}
    if fault == "name":
        tensors = {**tensors, "stranger": torch.zeros(3)}
    manifest, _ = write_weights(tmp_path, tensors, 9, 9)
    file = manifest.with_name("model.safetensors")
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    if fault == "missing":
        file.unlink()
    if fault == "no manifest":
        manifest.unlink()
    if fault == "junk":
        forge(manifest, b"not tensors at all")
    before = client.generate(*prompts[0])
    error = client.refused(json.dumps({"manifest": str(manifest)}).encode(), "/sightline/v1/adopt")
    assert (error.code, error.type) == (422, "weights")
    assert client.get("/health")["version"] == "0"
    # With cached keys and values, a prompt may differ in the last bits.
    after = client.generate(*prompts[0])
    assert after.choices[0].token_ids == before.choices[0].token_ids
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=TOLERANCE)


def forge(manifest: Path, data: bytes) -> None:
    """Make the manifest name a complete file that contains no weights."""
    import hashlib

    manifest.with_name("model.safetensors").write_bytes(data)
    values = json.loads(manifest.read_text())
    values["files"][0] |= {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(values))


# --- refusals


def as_json(client: Client, prompt: Prompt, **params: Any) -> dict[str, Any]:
    sampling = SamplingParams(max_tokens=2, **params)
    request = GenerateRequest.of(*prompt, sampling, client.modality)
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(request))
    return body


def put_at(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *before, last = path.split(".")
    place: Any = body
    for step in before:
        place = place[int(step)] if step.isdigit() else place[step]
    place[int(last) if last.isdigit() else last] = value
    return body


IMAGE_0, PLACE_0 = "image[0]", "features.mm_placeholders.image[0]"
BAD_FIELDS = [
    # The field, its value, the type of the error, and the path that it names.
    ("token_ids", [], "token_ids", "token_ids"),
    ("token_ids.0", -1, "token_ids", "token_ids[0]"),
    ("token_ids.1", 10**6, "token_ids", "token_ids[1]"),
    ("token_ids.1", 2**80, "token_ids", "token_ids[1]"),
    ("token_ids.0", "a", "schema", "token_ids[0]"),
    ("token_ids", None, "schema", "token_ids"),
    ("pixels", [0.0], "schema", "pixels"),
    ("model", "another", "model", "model"),
    ("sampling_params.max_tokens", 0, "sampling", "sampling_params.max_tokens"),
    ("sampling_params.max_tokens", 10**6, "too_long", "token_ids"),
    ("sampling_params.temperature", -1.0, "sampling", "sampling_params.temperature"),
    ("sampling_params.temperature", 1e-40, "sampling", "sampling_params.temperature"),
    ("sampling_params.temperature", 1e300, "sampling", "sampling_params.temperature"),
    ("sampling_params.top_p", 0.0, "sampling", "sampling_params.top_p"),
    ("sampling_params.top_p", "high", "schema", "sampling_params.top_p"),
    ("sampling_params.top_k", -2, "sampling", "sampling_params.top_k"),
    ("sampling_params.top_k", 2**64, "sampling", "sampling_params.top_k"),
    ("sampling_params.min_p", 2.0, "sampling", "sampling_params.min_p"),
    ("sampling_params.seed", -1, "sampling", "sampling_params.seed"),
    ("sampling_params.n", 0, "sampling", "sampling_params.n"),
    ("sampling_params.logprobs", 5, "sampling", "sampling_params.logprobs"),
    ("sampling_params.stop_token_ids", [10**6], "sampling", "sampling_params.stop_token_ids"),
    ("sampling_params.stop_token_ids", [1] * 257, "sampling", "sampling_params.stop_token_ids"),
    ("sampling_params.beam", 2, "schema", "sampling_params.beam"),
    ("features.mm_hashes.image.0", "0" * 64, "slots", f"features.mm_hashes.{IMAGE_0}"),
    ("features.mm_hashes.image", [], "slots", "features.mm_hashes.image"),
    ("features.mm_placeholders.image", [], "slots", "features.mm_placeholders.image"),
    ("features.kwargs_data.image", [], "slots", "features.kwargs_data.image"),
    ("features.mm_hashes", {"video": []}, "slots", "features"),
    ("features.kwargs_data.image.0", None, "schema", f"features.kwargs_data.{IMAGE_0}"),
    ("features.kwargs_data.image", None, "schema", "features.kwargs_data.image"),
    ("features.mm_hashes.image.0", None, "schema", f"features.mm_hashes.{IMAGE_0}"),
    ("features.mm_placeholders.image.0", None, "schema", PLACE_0),
    ("features.mm_placeholders.image.0.offset", "x", "schema", f"{PLACE_0}.offset"),
    ("features.kwargs_data.image.0", "iVBORw0KGgo=", "schema", f"features.kwargs_data.{IMAGE_0}"),
    ("features.kwargs_data.image.0", "mmraw:{}", "schema", f"features.kwargs_data.{IMAGE_0}"),
    ("features.mm_placeholders.image.0.offset", 10**6, "slots", PLACE_0),
    ("features.mm_placeholders.image.0.length", 0, "slots", PLACE_0),
    ("features.mm_placeholders.image.0.length", 2, "slots", PLACE_0),
    ("features.mm_placeholders.image.0.offset", 0, "pads", "token_ids[0]"),
    ("features", None, "pads", "token_ids[FIRST_PAD]"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "kind", "path"), BAD_FIELDS)
def test_client_error_is_a_400_with_type_and_path(
    client: Client, prompts: list[Prompt], field: str, value: Any, kind: str, path: str
) -> None:
    # The table uses images, as most families do.
    field, path = (text.replace(".image", f".{client.modality}") for text in (field, path))
    path = path.replace("FIRST_PAD", str(prompts[0][1][0].offset))
    body = put_at(as_json(client, prompts[0]), field, value)
    error = client.refused(json.dumps(body).encode())
    assert (error.code, error.type, error.path) == (400, kind, path), error
    assert error.fix


def two_images(reference: Reference, media: MediaStore) -> Prompt:
    refs = [media.put(Image.new("RGB", (32, 32), (c, c, c))) for c in (10, 20)]
    rendered = reference.renderer.render([user(*refs)])
    return rendered.token_ids, rendered.slots


@pytest.mark.parametrize("offsets", ["swapped", "same"])
def test_unordered_or_overlapping_slots_are_refused(
    client: Client, reference: Reference, media: MediaStore, offsets: str
) -> None:
    tokens, slots = two_images(reference, media)
    first, second = slots
    wrong = [second, first] if offsets == "swapped" else [first, msgspec_at(second, first.offset)]
    error = client.refused(json.dumps(as_json(client, (tokens, wrong))).encode())
    assert (error.code, error.type) == (400, "slots")
    assert error.path == f"features.mm_placeholders.{client.modality}[1]"


def msgspec_at(slot: Slot, offset: int) -> Slot:
    return msgspec.structs.replace(slot, offset=offset)


def with_item(client: Client, prompt: Prompt, **changes: Any) -> bytes:
    tokens, slots = prompt
    item = msgspec.structs.replace(slots[0].item, **changes)
    slot = msgspec.structs.replace(slots[0], item=item)
    return json.dumps(as_json(client, (tokens, [slot]))).encode()


def test_processor_settings_mismatch_names_both_sides(
    client: Client, tiny_model: Path, reference: Reference, media: MediaStore, tmp_path: Path
) -> None:
    if reference.family.name == "anyvlm":  # its settings are those of the folder
        copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
        file = copy / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_std": [0.1, 0.2, 0.3]}))
        other = load_family(copy)
    else:
        other = load_family(tiny_model, max_pixels=4096)
    ref = media.put(Image.new("RGB", (32, 32), (80, 20, 30)))
    rendered = load_renderer(tiny_model, media, other).render([user("What is it?", ref)])
    request = GenerateRequest.of(
        rendered.token_ids, rendered.slots, GREEDY, modality=client.modality
    )

    async def main() -> None:
        rollouts = GenerateClient(f"http://{client.host}:{client.port}", settings=other.settings)
        try:
            await rollouts.generate(request)
        finally:
            await rollouts.close()

    with pytest.raises(EngineError) as caught:
        asyncio.run(main())
    assert (caught.value.kind, caught.value.status) == ("fingerprint", 409)
    for family in (reference.family, other):
        assert json.dumps(family.settings, sort_keys=True) in caught.value.problem
    assert reference.family.settings != other.settings


def test_wrong_image_grid_is_a_400(client: Client, prompts: list[Prompt]) -> None:
    frames, rows, columns = prompts[0][1][0].item.grid
    grid = (frames, 2 * rows, 2 * columns)
    error = client.refused(with_item(client, prompts[0], grid=grid))
    assert (error.code, error.type) == (400, "slots")


def lost(
    client: Client, prompts: list[Prompt], media: MediaStore, colour: int
) -> tuple[bytes, Path]:
    """Return a request with its own image, and the image's file."""
    tokens, slots = prompts[0]
    ref = media.put(Image.new("RGB", (32, 32), (1, 2, colour)))
    item: MediaItem = msgspec.structs.replace(slots[0].item, ref=ref)
    slot = msgspec.structs.replace(slots[0], item=item)
    return json.dumps(as_json(client, (tokens, [slot]))).encode(), media.path(ref.digest)


def test_image_size_differing_from_its_ref_is_a_422(client: Client, prompts: list[Prompt]) -> None:
    client.generate(*prompts[0])
    ref = msgspec.structs.replace(prompts[0][1][0].item.ref, width=31)
    error = client.refused(with_item(client, prompts[0], ref=ref))
    assert (error.code, error.type) == (422, "media_refused")
    client.generate(*prompts[0])


@pytest.mark.parametrize(
    ("fault", "code"), [("missing", 404), ("corrupt", 422), ("unavailable", 503)]
)
def test_bad_image_file_fails_only_its_request(
    client: Client, prompts: list[Prompt], media: MediaStore, fault: str, code: int
) -> None:
    body, file = lost(client, prompts, media, code % 256)
    data = file.read_bytes()
    file.unlink()
    if fault == "corrupt":
        file.write_bytes(data[:-4] + b"oops")
    elif fault == "unavailable":
        file.mkdir()
    error = client.refused(body)
    assert (error.code, error.type) == (code, f"media_{fault}")
    file.rmdir() if fault == "unavailable" else file.unlink(missing_ok=True)
    file.write_bytes(data)  # a failure is not remembered
    assert client.call("POST", "/inference/v1/generate", body)[0] == 200


def test_undecodable_image_is_a_422(
    client: Client, prompts: list[Prompt], media: MediaStore
) -> None:
    ref = media.put(undecodable())
    tokens, slots = prompts[0]
    item = msgspec.structs.replace(slots[0].item, ref=ref)
    body = as_json(client, (tokens, [msgspec.structs.replace(slots[0], item=item)]))
    error = client.refused(json.dumps(body).encode())
    assert (error.code, error.type) == (422, "media_undecodable")


def test_a_body_over_the_limit_is_a_413(
    odd: Client, odd_settings: ServerSpec, prompts: list[Prompt]
) -> None:
    body = json.dumps(as_json(odd, prompts[0])).encode()
    assert odd.call("POST", "/inference/v1/generate", body)[0] == 200
    error = odd.refused(body.ljust(1024 * odd_settings.inference.max_model_len + 1))
    assert (error.code, error.type) == (413, "too_large")


def test_full_queue_is_a_retryable_503(
    odd: Client, odd_settings: ServerSpec, prompts: list[Prompt]
) -> None:
    together = Together(odd)
    rows, most = odd_settings.inference.max_num_seqs, odd_settings.max_waiting
    params = SamplingParams(max_tokens=200, seed=1)
    running = [together.generate(*prompts[0], params) for _ in range(rows)]
    odd.wait_for("now", "running", rows)
    short = SamplingParams(max_tokens=1, seed=1)
    waiting = [together.generate(*prompts[1], short) for _ in range(most)]
    odd.wait_for("now", "waiting", most)
    error = odd.refused(json.dumps(as_json(odd, prompts[2])).encode())
    assert (error.code, error.type) == (503, "overloaded")
    assert all(answer.result().choices for answer in [*running, *waiting])


def test_request_with_too_many_choices_is_accepted_by_an_empty_queue(
    odd: Client, odd_settings: ServerSpec, prompts: list[Prompt]
) -> None:
    num = odd_settings.inference.max_num_seqs + odd_settings.max_waiting + 1
    choices = odd.generate(*prompts[3], SamplingParams(max_tokens=1, seed=1, n=num)).choices
    assert len(choices) == num


def test_disconnected_client_frees_its_row(client: Client, prompts: list[Prompt]) -> None:
    before = client.totals()["cancelled"]
    body = json.dumps(
        put_at(as_json(client, prompts[0], seed=1), "sampling_params.max_tokens", 3500)
    ).encode()
    with socket.create_connection((client.host, client.port)) as connection:
        head = "POST /inference/v1/generate HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
        connection.sendall(head.encode() + body)
        client.wait_for("now", "running", 1)
    client.wait_for("totals", "cancelled", before + 1)
    assert client.now()["running"] == 0


# --- health and metrics


def test_health_and_metrics_report_the_served_version(
    client: Client, reference: Reference, prompts: list[Prompt]
) -> None:
    began = time.time()
    client.generate(*prompts[0])
    health = client.get("/health")
    assert health["status"] == "ok" and health["family"] == reference.family.name
    assert health["fingerprint"] == reference.family.fingerprint
    assert health["pad_token_ids"] == list(reference.renderer.pad_token_ids)
    text = client.call("GET", "/metrics")[1].decode()
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert float(values["sightline_sampled_tokens_total"]) >= GREEDY.max_tokens
    assert float(values["sightline_running"]) == 0
    stats = client.get(f"/sightline/v1/stats?since={began}")
    assert stats["busy"] and all(start <= end for start, end in stats["busy"])
    assert stats["busy"][-1][1] <= stats["time"]


@pytest.mark.torch_only("tests/vllm ends a server of its own")
def test_requests_in_flight_get_503_when_the_server_stops(
    settings: ServerSpec, prompts: list[Prompt]
) -> None:
    refusals: list[Any] = []
    with live(settings) as ending:
        body = put_at(as_json(ending, prompts[0]), "sampling_params.max_tokens", 3500)
        thread = threading.Thread(
            target=lambda: refusals.append(ending.refused(json.dumps(body).encode()))
        )
        thread.start()
        ending.wait_for("now", "running", 1)
    thread.join(20)
    assert (refusals[0].code, refusals[0].type) == (503, "stopping")
