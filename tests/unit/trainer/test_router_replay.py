"""Routes travel from the engine to the trainer, which computes each token with the same experts."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import serve_here

from sightline.compute.attention import PackedPattern
from sightline.compute.model import load_model
from sightline.config import RunFile
from sightline.envs import Environment, Task
from sightline.errors import Misaligned
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import PackSize
from sightline.pack.split import take_sequences
from sightline.pack.truncate import truncate_sample
from sightline.pixels import Materializer
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace, decode_trace, encode_trace
from sightline.trace.codec import encode_traces
from sightline.trace.sample import flatten
from sightline.trainer.feed import BatchPreparer, ReadyBatch
from sightline.trainer.learner import SUM_NAMES, Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.step_result import MetricSums
from sightline.wire.array import Array
from sightline.wire.control import RolloutRequest
from sightline.wire.sample import Batch, Sample

WHOLE, ALONE = PackSize(1 << 20, 1 << 20), PackSize(1, 1)


class Talk(Environment):
    """Two turns with an image, a fork, and a turn with a window of the history."""

    name = "talk"

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    async def rollout(self, task: Task, chat: Any) -> float:
        picture = chat.put(Image.new("RGB", (64, 64), (200, 30, 0)))
        await chat.send([user("which colour is this", picture)])
        other = chat.branch()
        await chat.send([user("and now")])
        await other.send([user("what is it")])
        await chat.ask([user("start again with red and blue")])
        return float(task.index)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint, and one whose routers have noise, as rounding causes it."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("model", "noisy"):
        write_tiny("qwen_vl", folder / name, seed=0, type="qwen3_vl_moe")
    file = folder / "noisy" / "model.safetensors"
    weights, draws = load_file(file), torch.Generator().manual_seed(1)
    for name in sorted(weights):
        if name.endswith("mlp.gate.weight"):
            weights[name] += 3e-3 * torch.randn(weights[name].shape, generator=draws)
    save_file(weights, file, {"format": "pt"})
    return folder / "model", folder / "noisy"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("store"))


def play(model: Path, served: Path, store: MediaStore, count: int) -> list[Trace]:
    """Play rollouts of one group with the chats of a run file."""

    async def main(address: str) -> list[Trace]:
        config = RunFile.model_validate(
            {
                "model": {"path": str(model)},
                "env": {"name": "color_codeword"},
                "rollout": {"max_tokens": 12, "max_turns": 8},
                "inference": {"max_model_len": 1024, "device": "cpu"},
            }
        )
        chats = build_policy_chats(config, [address], store)
        try:
            player = RolloutPlayer(Talk(), chats, 60.0)
            requests = [RolloutRequest(f"r{i}", "g", i, "train", i, 1.0) for i in range(count)]
            return [(await player.play(request)).trace for request in requests]
        finally:
            await chats.close()

    with serve_here(served, store.root, ["--device", "cpu", "--max-model-len", "1024"]) as address:
        return asyncio.run(main(address))


def with_advantages(traces: list[Trace]) -> list[Sample]:
    """Return the samples, encoded and decoded by every codec on their way."""
    samples = []
    for trace in traces:
        assert not trace.error, trace.error
        samples += flatten(decode_trace(encode_trace(trace)), lambda node: 0.5 + node.id)
    return Batch.from_bytes(Batch(1, samples).to_bytes()).samples


@pytest.fixture(scope="module")
def traces(models: tuple[Path, Path], store: MediaStore) -> list[Trace]:
    return play(*models, store, count=4)


@pytest.fixture(scope="module")
def samples(traces: list[Trace]) -> list[Sample]:
    return with_advantages(traces)


def build_learner(model: Path, store: MediaStore, replays: bool = True, **trainer: Any) -> Learner:
    config = making.model_config(model, router_replay=replays)
    return making.build_learner(config, making.trainer_config(**trainer), store, steps=10)


def ready(
    learner: Learner, store: MediaStore, samples: list[Sample], limit: PackSize = WHOLE
) -> ReadyBatch:
    pixels = MicroBatchPixels(Materializer(learner.family, store, max_bytes=1 << 24))
    return BatchPreparer(pixels, limit).prepare(Batch(1, samples), digest="").with_pixels()


def step(learner: Learner, store: MediaStore, samples: list[Sample]) -> dict[str, Any]:
    return learner.step(ready(learner, store, samples)).metrics


def gradients(learner: Learner, batch: ReadyBatch) -> dict[str, torch.Tensor]:
    learner.optimizer.zero_grad(set_to_none=True)
    for micro_batch in batch.micro_batches:
        learner.backward(micro_batch, MetricSums(SUM_NAMES))
    parameters = learner.forward.model.named_parameters()
    return {n: p.grad.clone() for n, p in parameters if p.grad is not None}


def check_equal(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, gradient in ours.items():
        off = float((gradient - others[name]).norm())
        assert off <= 1e-5 * float(gradient.norm()) + 1e-9, name


@torch.no_grad()
def compute_routes(model: Path, sample: Sample, store: MediaStore) -> np.ndarray:
    family: Any = load_family(model)
    forward: Any = load_model(model, family, "cpu", "float32")
    slots = [msgspec.structs.replace(s, item=sample.items[s.item]) for s in sample.slots]
    positions, _ = family.positions(len(sample.token_ids), slots)
    features = places = None
    if slots:
        patches = [family.patches(store.image(i.ref), i) for i in sample.items]
        grids = [item.grid for item in sample.items]
        features = forward.encode(torch.from_numpy(np.concatenate(patches)), grids)
        places = torch.cat([torch.arange(s.offset, s.end) for s in slots])
    forward.hidden(
        torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None],
        torch.from_numpy(positions.astype(np.int64))[:, None],
        features,
        places,
        PackedPattern([len(sample.token_ids)], torch.device("cpu")),
    )
    routes: np.ndarray = forward.routing.get_routes().numpy()
    return routes


def test_a_sample_has_the_routes_of_its_own_tokens(
    models: tuple[Path, Path], samples: list[Sample], store: MediaStore
) -> None:
    """Prompt, image pads, earlier turns, forks and windows have the routes of the sampler."""
    assert len(samples) == 12 and sum(bool(sample.slots) for sample in samples) == 8
    for sample in samples[:3]:
        assert sample.routes is not None
        routes, wanted = sample.routes.numpy(), compute_routes(models[1], sample, store)
        np.testing.assert_array_equal(np.sort(routes[:-1]), np.sort(wanted[:-1]))
        assert (routes[-1] == 255).all()


def test_replay_restores_the_policy_of_a_sampler_with_other_routes(
    models: tuple[Path, Path], samples: list[Sample], store: MediaStore
) -> None:
    with_replay = step(build_learner(models[0], store), store, samples)
    without = step(build_learner(models[0], store, replays=False), store, samples)
    print(
        f"mismatch KL {with_replay['mismatch_kl']:.2e} with replay, {without['mismatch_kl']:.2e} "
        f"without; {without['differing_routes_fraction']:.2%} of routes differ"
    )
    assert without["differing_routes_fraction"] > 0.005
    assert with_replay["differing_routes_fraction"] > 0.005
    assert with_replay["mismatch_kl"] < 0.1 * without["mismatch_kl"]


def test_equal_weights_have_no_differing_routes(
    models: tuple[Path, Path], store: MediaStore
) -> None:
    samples = with_advantages(play(models[1], models[1], store, count=1))
    metrics = step(build_learner(models[1], store), store, samples)
    assert metrics["differing_routes_fraction"] == 0.0
    assert metrics["mismatch_kl"] < 1e-9


def test_a_batch_without_routes_trains_without_replay(
    models: tuple[Path, Path], samples: list[Sample], store: MediaStore
) -> None:
    bare = [msgspec.structs.replace(sample, routes=None) for sample in samples]
    metrics = step(build_learner(models[0], store), store, bare)
    compared = step(build_learner(models[0], store, replays=False), store, samples)
    assert metrics["differing_routes_fraction"] is None
    assert metrics["mismatch_kl"] == pytest.approx(compared["mismatch_kl"], rel=1e-3)


def test_packs_and_trees_replay_the_same_routes(
    models: tuple[Path, Path], samples: list[Sample], store: MediaStore
) -> None:
    learner = build_learner(models[0], store)
    alone = [msgspec.structs.replace(s, group_id=f"g{i}") for i, s in enumerate(samples)]
    flat = ready(learner, store, alone, ALONE)
    packed, tree = ready(learner, store, alone), ready(learner, store, samples)
    num_tokens = [
        sum(len(m.batch.token_ids) for m in r.micro_batches) for r in (flat, packed, tree)
    ]
    assert num_tokens[0] == num_tokens[1] > num_tokens[2]
    assert len(flat.micro_batches) == len(samples) and len(packed.micro_batches) == 1
    wanted = gradients(learner, flat)
    check_equal(wanted, gradients(learner, packed))
    check_equal(wanted, gradients(learner, tree))
    learner.replays_routes = False
    with pytest.raises(AssertionError):
        check_equal(wanted, gradients(learner, flat))


def test_parts_of_a_sample_keep_their_routes(
    models: tuple[Path, Path], samples: list[Sample], store: MediaStore
) -> None:
    sample = samples[0]
    assert sample.routes is not None
    shorter = truncate_sample(sample, len(sample.token_ids) - 2)
    assert isinstance(shorter, Sample) and shorter.routes is not None
    length = len(shorter.token_ids)
    np.testing.assert_array_equal(shorter.routes.numpy(), sample.routes.numpy()[:length])
    learner = build_learner(models[0], store)
    tree = ready(learner, store, samples).micro_batches[0].batch
    by_tokens = {
        s.token_ids.numpy().tobytes(): s.routes.numpy() for s in samples if s.routes is not None
    }
    for single in (part.batch for part in take_sequences(tree)):
        ids = single.token_ids.numpy()
        whole = next(key for key in by_tokens if key.startswith(ids.tobytes()))
        assert single.routes is not None
        # The last token has one if another sample continues there.
        wanted = by_tokens[whole][: len(ids) - 1]
        np.testing.assert_array_equal(np.sort(single.routes.numpy()[:-1]), np.sort(wanted))


def test_routes_to_other_experts_are_refused(
    models: tuple[Path, Path], samples: list[Sample], store: MediaStore
) -> None:
    sample = samples[0]
    assert sample.routes is not None
    wrong = np.where(sample.routes.numpy() == 3, 4, sample.routes.numpy())
    routes = Array.of(wrong, "uint8")
    with pytest.raises(Misaligned, match="a route to expert 4, and the model has 4 experts"):
        step(
            build_learner(models[0], store),
            store,
            [msgspec.structs.replace(sample, routes=routes)],
        )
    with pytest.raises(Misaligned, match=r"\d+ tokens have routes of shape"):
        msgspec.structs.replace(sample, routes=Array.of(wrong[1:], "uint8"))


def test_trace_files_have_no_routes(traces: list[Trace], tmp_path: Path) -> None:
    from sightline.trace import read_traces

    (tmp_path / "traces").write_bytes(encode_traces(traces))
    for kept, trace in zip(read_traces(tmp_path / "traces"), traces, strict=True):
        assert all(node.routes is None for node in kept.nodes)
        assert all(node.routes is not None for node in trace.nodes)
        assert [n.token_ids for n in kept.nodes] == [n.token_ids for n in trace.nodes]


def test_router_trains_and_its_correction_bias_does_not(tmp_path: Path, store: MediaStore) -> None:
    write_tiny("glm_v", tmp_path / "model", seed=0, type="glm4v_moe")
    learner = build_learner(tmp_path / "model", store)
    state = learner.forward.model.state_dict()
    [bias] = [name for name in state if name.endswith("e_score_correction_bias")]
    [router] = [name for name in state if name.endswith("gate.weight")]
    before = {name: state[name].clone() for name in (bias, router)}
    metrics = step(learner, store, making.samples(tmp_path / "model", store, count=2))
    assert math.isfinite(metrics["loss"])
    assert torch.equal(state[bias], before[bias])
    assert not torch.equal(state[router], before[router])
