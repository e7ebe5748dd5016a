"""The trainer's resident memory stays constant, and host buffers go back to the system."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import making
import pytest
import torch
from PIL import Image

from sightline.algo.algorithms import Supervised
from sightline.config import SftFile
from sightline.families.device_copy import copy_for_thread
from sightline.media import MediaStore
from sightline.trainer.build import build_conversations, build_pixels
from sightline.trainer.feed import BatchPrefetcher
from sightline.trainer.optimizer import MasterAdamW
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.snapshot import take_snapshot

STEPS, WARM = 500, 100
MARGIN_BYTES = 32 << 20
"""The pixels of 400 steps are 480 MB. Allocators and caches move by a few megabytes."""
PAGE_BYTES = 4096


def measure_rss() -> int:
    """Return the bytes that this process holds now. A peak would hide what it returned."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> SftFile:
    """Supervised training on two conversations a step, each with a screenshot of 600 KB."""
    lines = []
    for i in range(8):
        Image.new("RGB", (448, 448), (i, 9 * i, 0)).save(tmp_path / f"{i}.png")
        talk = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is"}]},
            {"role": "assistant", "content": "A"},
        ]
        lines.append(json.dumps({"messages": talk, "images": [f"{i}.png"]}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    return SftFile.model_validate(
        {
            "model": {"path": str(tiny_model), "max_pixels": 448 * 448},
            "data": {"path": str(tmp_path / "talks.jsonl")},
            "sft": {"output_dir": str(tmp_path / "out"), "batch_size": 2},
            "run": {"steps": STEPS},
            "media": {"root": str(tmp_path / "media")},
            "trainer": {"device": "cpu", "pixel_cache_mb": 16, "stall_timeout_s": 0},
        }
    )


def test_resident_memory_stays_constant_over_hundreds_of_steps(config: SftFile) -> None:
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
