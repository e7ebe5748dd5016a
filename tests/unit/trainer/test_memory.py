"""The trainer's resident memory stays constant, and host buffers go back to the system."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import making
import pytest
import torch
from PIL import Image

from sightline.algo.algorithms import Supervised
from sightline.config import SftFile
from sightline.families.device_copy import copy_for_thread
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trainer import loop
from sightline.trainer.build import build, build_conversations, build_pixels
from sightline.trainer.feed import BatchPrefetcher, ReadyBatch
from sightline.trainer.optimizer import MasterAdamW
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.snapshot import take_snapshot

STEPS, WARM = 500, 100
MARGIN_BYTES = 32 << 20
"""The pixels of the feed's 400 steps are 480 MB. Allocators and caches move by a few megabytes."""
STEP_MARGIN_BYTES = 16 << 20
"""The pixels of 100 whole steps are 40 MB, those of 400 steps 160 MB."""
PAGE_BYTES = 4096


def measure_rss() -> int:
    """Return the bytes that this process holds now. A peak would hide what it returned."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def build_config(model: Path, folder: Path, steps: int, side: int) -> SftFile:
    """Return settings for two conversations a step, each with a screenshot of `side` pixels."""
    lines = []
    for i in range(8):
        Image.new("RGB", (side, side), (i, 9 * i, 0)).save(folder / f"{i}.png")
        talk = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is"}]},
            {"role": "assistant", "content": "A"},
        ]
        lines.append(json.dumps({"messages": talk, "images": [f"{i}.png"]}))
    (folder / "talks.jsonl").write_text("\n".join(lines) + "\n")
    return SftFile.model_validate(
        {
            "model": {"path": str(model), "max_pixels": side * side},
            "data": {"path": str(folder / "talks.jsonl")},
            "sft": {"output_dir": str(folder / "out"), "batch_size": 2},
            "run": {"steps": steps},
            "media": {"root": str(folder / "media")},
            "trainer": {
                "device": "cpu",
                "pixel_cache_mb": 16,
                "checkpoint_every": 25,
                "stall_timeout_s": 0,
            },
        }
    )


def test_pixels_of_the_feed_are_freed(tiny_model: Path, tmp_path: Path) -> None:
    """The feed alone, with more pixels per step than a test of whole steps could afford."""
    config = build_config(tiny_model, tmp_path, STEPS, side=448)
    store = MediaStore(Path(config.media.root))
    learner = making.build_learner(
        config.model, config.trainer, store, STEPS, algorithm=Supervised(config.algorithm)
    )
    pixels = build_pixels(learner, store)
    num_bytes, rss = 0, 0
    for ready in BatchPrefetcher(build_conversations(config, learner, pixels)):
        for _, micro_batch in ready.iterate_with_pixels():
            assert micro_batch.made is not None
            assert micro_batch.made.flags.owndata, "from numpy, not a view of a tensor"
            num_bytes += micro_batch.made.nbytes
            del micro_batch
        if ready.step == WARM:
            rss, num_bytes = measure_rss(), 0
    growth = measure_rss() - rss
    assert num_bytes > 10 * MARGIN_BYTES
    assert growth < MARGIN_BYTES, f"{growth / 1e6:.0f} MB in {STEPS - WARM} steps"
    pixels.materializer.close()


@pytest.mark.parametrize("steps", [150, pytest.param(500, marks=pytest.mark.thorough)])
def test_memory_of_a_training_loop_stays_constant(
    tiny_model: Path, tmp_path: Path, steps: int
) -> None:
    """The loop of `sightline sft`: feed, forward, backward, update, metrics and checkpoints."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    components = build(build_config(tiny_model, tmp_path, steps, side=256), run_dir)
    every, measured = min(steps // 3, 100), dict[int, int]()

    def iterate_measured() -> Iterator[ReadyBatch]:
        for ready in feed:
            yield ready
            if ready.step % every == 0:
                components.run_writer.saver.background_task.wait()
                measured[ready.step] = measure_rss()

    feed, components.feed = components.feed, iterate_measured()
    loop.run(components)
    print({step: f"{rss / 1e6:.1f} MB" for step, rss in measured.items()})
    assert list(measured) == list(range(every, steps + 1, every))
    growth = measured[steps] - measured[every]
    assert growth < STEP_MARGIN_BYTES, f"{growth / 1e6:.0f} MB in {steps - every} steps"


def test_snapshot_is_copied_into_memory_that_another_thread_may_free() -> None:
    """A checkpoint's thread frees the copies that the loop made."""
    model = torch.nn.Linear(8, 8)
    optimizer = MasterAdamW([{"params": list(model.parameters())}], masters={})
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    tensors = take_snapshot(model, optimizer, ParallelDims()).tensors
    assert torch.equal(tensors["model/weight"], model.weight) and len(tensors) > 6
    copies = [tensor for name, tensor in tensors.items() if not name.startswith("rng")]
    assert not any(tensor.untyped_storage().resizable() for tensor in copies), "torch's own memory"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_copies_for_other_threads_are_exact_and_own_their_memory(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.arange(6).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    copy = copy_for_thread(tensor)
    assert copy.dtype == dtype and copy.shape == tensor.shape and torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
