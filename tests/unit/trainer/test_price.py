"""The estimated cost of a model, compared with the operations that torch counts."""

from __future__ import annotations

from pathlib import Path

import making
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from sightline.compute.model import load_model
from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import MicroBatchWork, PackSize, pack
from sightline.trainer.distribute import estimate_price
from sightline.trainer.feed import ReadyMicroBatch
from sightline.trainer.forward_pass import compute_hidden


def test_flop_estimate_is_close_to_torchs_count(tiny_model: Path, store: MediaStore) -> None:
    family = load_family(tiny_model)
    forward = load_model(tiny_model, family, "cpu", "float32")
    [packed] = pack(making.samples(tiny_model, store, 8), 1, family, PackSize(1 << 20, 1 << 20))
    patches = np.concatenate(
        [family.patches(store.image(e.item.ref), e.item) for e in packed.items]
    )
    with FlopCounterMode(display=False) as counter:
        hidden = compute_hidden(
            forward, ReadyMicroBatch(packed, patches), family, torch.device("cpu")
        )
        forward.logits(hidden).sum().backward()
    work = MicroBatchWork.of(packed)
    assert min(work.tokens, work.trained, work.patches) > 0
    assert 0.8 < estimate_price(forward).of(work) / counter.get_total_flops() < 1.2, (
        estimate_price(forward).of(work) / counter.get_total_flops()
    )
