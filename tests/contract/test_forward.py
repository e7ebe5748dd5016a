"""Guarantees of every family's torch half, on every checkpoint of conftest with weights.

1. It packs as the family declares: no sequence depends on the others in its pack.
2. Images are encoded separately, and inserted at the given indices.
3. Image features depend only on the vision parameters.
4. The engine's logprobs equal those of one forward pass, and the trainer updates every parameter.
5. The same seed always gives the same tiny checkpoint.
6. Blocks can be sharded one by one, and the smallest image goes through the whole tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from PIL import Image
from serving import live, next_turn
from shards import num_examples

from sightline.compute.attention import PackedPattern, TreePattern
from sightline.compute.model import load_model
from sightline.families import Forward
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaRef
from sightline.message import Message, user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.forward_pass import compute_hidden
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.wire import MediaItem, Slot
from sightline.wire.generate import SamplingParams
from sightline.wire.sample import Batch
from tests.contract.case import IMAGE_SIZES

CPU = torch.device("cpu")
WHOLE, ALONE = PackSize(1 << 20, 1 << 20), PackSize(1, 1)
TOLERANCE = 1e-5


@pytest.fixture
def forward(computing: Any) -> Forward:
    return load_model(computing.path, computing.family, "cpu", "float32")


def prepare(computing: Any, samples: Sequence[Any], limit: PackSize) -> ReadyBatch:
    materializer = Materializer(computing.family, computing.store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), limit)
    ready = preparer.prepare(Batch(1, list(samples)), digest="").with_pixels()
    materializer.close()
    return ready


def encoded(computing: Any, forward: Forward, items: Sequence[MediaItem]) -> torch.Tensor:
    family, store = computing.family, computing.store
    patches = [family.patches(store.image(item.ref), item) for item in items]
    stacked = torch.from_numpy(np.concatenate(patches))
    return forward.encode(stacked, [item.grid for item in items])


def hidden(
    computing: Any,
    forward: Forward,
    tokens: Sequence[int],
    slots: Sequence[Slot],
    features: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (T, H) of one sequence, computed in one pass."""
    if slots and features is None:
        features = encoded(computing, forward, [slot.item for slot in slots])
    return forward.hidden(
        torch.tensor([list(tokens)]),
        positions(computing, len(tokens), slots),
        features,
        places_of(computing, slots),
        PackedPattern([len(tokens)], CPU),
    )[0]


def positions(computing: Any, num_tokens: int, slots: Sequence[Slot]) -> torch.Tensor:
    computed, _ = computing.family.positions(num_tokens, slots)
    return torch.from_numpy(computed.astype(np.int64))[:, None]


def shown(computing: Any, i: int) -> list[MediaRef]:
    """Return image `i` if the checkpoint supports images."""
    return computing.refs[i : i + 1] if computing.family.shows_media else []


def places_of(computing: Any, slots: Sequence[Slot]) -> torch.Tensor | None:
    offsets = [slot.offset + computing.family.feature_offsets(slot.item) for slot in slots]
    return torch.from_numpy(np.concatenate(offsets)) if offsets else None


# -- packing


def test_packed_sequences_match_separate_ones(computing: Any, forward: Forward) -> None:
    samples = making.samples(computing.path, computing.store, count=5)
    packed, alone = (prepare(computing, samples, limit) for limit in (WHOLE, ALONE))
    # In formats with a common prefix, the first group is a tree in its own micro-batch.
    assert len(packed.micro_batches) in (1, 2)
    assert len(alone.micro_batches) == len(samples)
    together, apart = gradients(computing, forward, packed), gradients(computing, forward, alone)
    assert together.keys() == apart.keys()
    tolerance = computing.case.gradient_tolerance
    # Gradients of pure rounding noise are compared with the size of an ordinary one.
    floor = 1e-3 * max(float(gradient.norm()) for gradient in apart.values())
    for name, gradient in apart.items():
        size = max(float(gradient.norm()), floor)
        assert float((gradient - together[name]).norm()) / size < tolerance, name


def gradients(computing: Any, forward: Forward, batch: ReadyBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of the trained tokens' summed logprobs."""
    forward.model.zero_grad(set_to_none=True)
    for ready in batch.micro_batches:
        logits = forward.logits(compute_hidden(forward, ready, computing.family, CPU))
        trained = ready.batch.trained.numpy()
        chosen = torch.from_numpy(ready.batch.token_ids.numpy()[trained].astype(np.int64))
        torch.log_softmax(logits, dim=-1).gather(-1, chosen[:, None]).sum().backward()
    named = forward.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def test_tree_forward_matches_its_separate_paths(computing: Any, forward: Forward) -> None:
    if computing.family.packing.kind != "tree":
        return  # the others say nothing of trees
    rendered = computing.renderer.render([user("look", *shown(computing, 2))])
    prompt, slots = rendered.token_ids, rendered.slots
    answers = [prompt[:4], prompt[1:4]]
    fork, end = len(prompt), len(prompt) + 7
    ends = np.array([end] * fork + [fork + 4] * 4 + [end] * 3)
    paths = [[*range(fork), *range(fork, fork + 4)], [*range(fork), *range(fork + 4, end)]]
    along = [positions(computing, len(path), slots) for path in paths]
    items = [slot.item for slot in slots]
    features = encoded(computing, forward, items) if items else None
    with torch.no_grad():
        tree = forward.hidden(
            torch.tensor([[*prompt, *answers[0], *answers[1]]]),
            torch.cat([along[0], along[1][:, :, fork:]], dim=-1),
            features,
            places_of(computing, slots),
            TreePattern(ends, CPU),
        )[0]
        for path, answer in zip(paths, answers, strict=True):
            alone = hidden(computing, forward, [*prompt, *answer], slots, features)
            torch.testing.assert_close(tree[path], alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_tree_gradients_match_separate_samples(computing: Any, forward: Forward) -> None:
    if computing.family.packing.kind != "tree":
        return  # the others say nothing of trees
    samples = making.group(computing.path, computing.store, count=5)
    tree, alone = (prepare(computing, samples, limit) for limit in (WHOLE, ALONE))
    sizes = [sum(len(m.batch.token_ids) for m in batch.micro_batches) for batch in (tree, alone)]
    assert len(tree.micro_batches) == 1 and sizes[0] < sizes[1]
    together, apart = gradients(computing, forward, tree), gradients(computing, forward, alone)
    floor = 1e-3 * max(float(gradient.norm()) for gradient in apart.values())
    for name, gradient in apart.items():
        size = max(float(gradient.norm()), floor)
        assert float((gradient - together[name]).norm()) / size < TOLERANCE, name


# -- images


def test_image_encoding_does_not_depend_on_neighbours(computing: Any, forward: Forward) -> None:
    if not computing.family.shows_media:
        return  # the others say nothing of images
    items = [computing.family.item(ref) for ref in computing.refs]
    with torch.no_grad():
        together = encoded(computing, forward, items)
        parts = together.split([len(computing.family.feature_offsets(item)) for item in items])
        for item, part in zip(items, parts, strict=True):
            alone = encoded(computing, forward, [item])
            torch.testing.assert_close(part, alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_pixels_are_bit_identical_to_the_checkpoints_processor(
    computing: Any, forward: Any
) -> None:
    family, make = computing.family, computing.case.make_arrays
    if not family.shows_media or make is None:
        return
    rng = np.random.default_rng(0)
    for size in (*IMAGE_SIZES[:2], *rng.integers(20, 420, (num_examples(98, 4), 2)).tolist()):
        image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        item = family.item(MediaRef("0" * 64, "image/png", *size, 1))
        patches = family.patches(image, item)
        if hasattr(family, "rows"):
            arrays = {"pixel_values": family.rows(patches), "image_grid_thw": [item.grid]}
        else:
            arrays = forward.read_arrays(torch.from_numpy(patches), [item.grid])
        wanted = make(computing, image)
        for name, array in arrays.items():
            ours, theirs = np.asarray(array), np.asarray(wanted[name])
            # Some processors fill up to a fixed number of patches.
            slices = tuple(slice(0, length) for length in ours.shape)
            assert np.array_equal(ours, theirs[slices]), (name, size)
            assert len(np.unique(theirs[:, ours.shape[1] :])) <= 1, (name, size)


def test_image_features_are_placed_at_their_slots(computing: Any, forward: Forward) -> None:
    if not computing.family.shows_media:
        return  # the others say nothing of images
    rendered = computing.renderer.render([user(computing.refs[0], "what?")])
    slots, pads = rendered.slots, computing.renderer.pad_token_ids
    letter = computing.renderer.render([user("x")]).token_ids[1]
    spelled = [letter if token in pads else token for token in rendered.token_ids]
    lettered = list(rendered.token_ids)
    for place in slots[0].offset + computing.family.feature_offsets(slots[0].item):
        lettered[place] = letter
    with torch.no_grad():
        with_pads = hidden(computing, forward, rendered.token_ids, slots)
        without = hidden(computing, forward, lettered, slots)
        unseen = hidden(computing, forward, spelled, [])
    assert torch.equal(with_pads, without)
    assert not torch.allclose(with_pads[-1], unseen[-1], atol=1e-4)


def test_features_depend_only_on_vision_parameters(computing: Any, forward: Forward) -> None:
    named, vision = dict(forward.model.named_parameters()), dict(forward.vision_parameters())
    if not computing.family.shows_media:
        assert not vision
        return
    assert vision and all(named[name] is parameter for name, parameter in vision.items())
    encoded(computing, forward, [computing.family.item(computing.refs[0])]).sum().backward()
    assert {name for name, p in named.items() if p.grad is not None} == set(vision)


# -- engine and trainer


def test_engine_logprobs_match_one_forward_pass(computing: Any, forward: Forward) -> None:
    renderer = computing.renderer
    settings = ServerSpec.of(
        path=computing.path,
        media_roots=(computing.store.root,),
        device="cpu",
        max_num_seqs=4,
        max_model_len=1024,
    )
    rendered = renderer.render([user("Look.", *shown(computing, 2))])
    tokens, slots = rendered.token_ids, rendered.slots
    with live(settings) as live_client:
        client = replace(live_client, modality=computing.family.modality)
        for turn in range(2):
            params = SamplingParams(
                max_tokens=6, seed=turn, stop_token_ids=list(renderer.stop_token_ids)
            )
            choice = client.generate(tokens, slots, params).choices[0]
            assert choice.logprobs is not None
            token_ids = choice.token_ids
            expected = logprobs(computing, forward, tokens, token_ids, slots)
            engine_logprobs = [entry.logprob for entry in choice.logprobs.content]
            np.testing.assert_allclose(engine_logprobs, expected, atol=TOLERANCE)
            new = user("And?", *shown(computing, turn))
            if computing.case.wants_query:  # a question would rewrite history
                new = Message("tool", new.content)
            tokens, slots = next_turn(renderer, tokens, slots, token_ids, new)


@torch.no_grad()
def logprobs(
    computing: Any,
    forward: Forward,
    prompt: Sequence[int],
    completion: Sequence[int],
    slots: Sequence[Slot],
) -> np.ndarray:
    """Return the logprobs of the tokens in `said`, without banned ids."""
    states = hidden(computing, forward, [*prompt, *completion], slots)[len(prompt) - 1 : -1]
    logits = forward.logits(states)
    logits[:, list(computing.renderer.pad_token_ids)] = float("-inf")
    chosen: np.ndarray = (
        logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()
    )
    return chosen


def test_training_steps_change_every_parameter(computing: Any) -> None:
    samples = making.samples(computing.path, computing.store, count=4)
    config = making.trainer_config()
    learner = making.build_learner(
        making.model_config(computing.path), config, computing.store, steps=3
    )
    before = {name: p.detach().clone() for name, p in learner.forward.model.named_parameters()}
    for _ in range(3):
        learner.step(prepare(computing, samples, WHOLE))
    after = dict(learner.forward.model.named_parameters())
    assert [name for name, old in before.items() if torch.equal(old, after[name])] == []


# -- the tiny checkpoint


def test_equal_seeds_write_equal_checkpoints(computing: Any, tmp_path: Path) -> None:
    folders = {"one": 1, "same": 1, "other": 2}
    for folder, seed in folders.items():
        write_tiny(computing.family.name, tmp_path / folder, seed=seed)
    one, same, other = (digests(tmp_path / folder) for folder in folders)
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


def digests(folder: Path) -> dict[str, str]:
    """Compare digests instead of bytes, because pytest would explain a difference for minutes."""
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_blocks_are_distinct_and_the_smallest_image_uses_the_whole_tower(
    computing: Any, forward: Forward
) -> None:
    """Check the blocks that ranks shard, and the image that a rank without images computes."""
    blocks = forward.blocks()
    ids = [id(parameter) for block in blocks for parameter in block.parameters()]
    assert len(blocks) > 1 and len(ids) == len(set(ids))
    assert set(ids) < {id(parameter) for parameter in forward.model.parameters()}
    smallest = forward.blank_image()
    assert (smallest is not None) == computing.family.shows_media
    if smallest is None:
        return
    patches, grid = smallest
    assert patches.dtype == torch.uint8 and len(patches) == np.prod(grid)
    forward.encode(patches, [grid]).square().sum().backward()
    missed = [name for name, p in forward.vision_parameters() if p.grad is None]
    assert not missed
