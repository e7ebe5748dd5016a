"""Values that depend on image sizes are computed on the host.

The numbers are the same, and a step never waits for the device to read them back.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.compute.model import load_model
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.learner import SUM_NAMES
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.step_result import MetricSums
from sightline.wire.sample import Batch

TYPES = {
    "qwen3_vl": ("qwen_vl", {"type": "qwen3_vl"}),
    "qwen3_vl_moe": ("qwen_vl", {"type": "qwen3_vl_moe"}),
    "qwen2_5_vl": ("qwen_vl", {"type": "qwen2_5_vl"}),
    "qwen3_5": ("qwen_vl", {"type": "qwen3_5"}),
    "kimi_k25": ("kimi_k25", {}),
    "glm46v": ("glm_v", {}),
    "glm4v_moe": ("glm_v", {"type": "glm4v_moe"}),
}
GRIDS = [(1, 2, 2), (1, 4, 6), (1, 10, 2), (1, 4, 6), (1, 18, 14)]
# On a GPU, each of these waits until the device reaches it.
ASKING = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::equal",
)
INDEXING = ("aten::index.Tensor", "aten::index_put", "aten::index_put_")


class Questions(TorchDispatchMode):
    """Counts operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        # Indexing with a mask reads its values.
        is_mask = name in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.asked[name] += name in ASKING or is_mask
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, options = TYPES[request.param]
    write_tiny(family, tmp_path / request.param, seed=0, **options)
    return tmp_path / request.param


def test_tower_with_precomputed_sizes_matches_transformers(model: Path) -> None:
    family = load_family(model)
    forward: Any = load_model(model, family, "cpu", "float32")
    size = (sum(int(np.prod(grid)) for grid in GRIDS), 3 * family.patch**2)
    patches = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    ours = forward.encode(patches, GRIDS)
    body = forward.model.model
    rows = forward.rows(patches)
    if model.name == "kimi_k25":
        out = body.vision_tower(rows, grid_thw=torch.tensor(GRIDS))
        theirs = body.mm_projector(out.pooler_output).squeeze(1)
    else:
        out = body.visual(rows, grid_thw=torch.tensor(GRIDS))
        theirs = torch.cat(
            [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], dim=-1
        )
    assert len(ours) == sum(int(np.prod(grid)) for grid in GRIDS) // family.merge**2
    assert ours.equal(theirs)


def test_micro_batch_does_not_synchronize_with_the_device(model: Path, store: MediaStore) -> None:
    learner = making.build_learner(
        making.model_config(model), making.trainer_config(), store, steps=2
    )
    materializer = Materializer(learner.family, store, max_bytes=1 << 24)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
    samples = making.samples(model, store, count=3)
    ready = preparer.prepare(Batch(1, samples), digest="").with_pixels().micro_batches[0]
    materializer.close()
    calls = []
    for _ in range(2):  # the second time the host knows the sizes
        metric_sums = MetricSums(SUM_NAMES)
        with Questions() as questions:
            learner.backward(ready, metric_sums)
        calls.append(+questions.asked)
    assert ready.batch.slots and calls[0], "the host has asked itself"
    assert not calls[1]
