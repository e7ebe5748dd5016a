"""The least time in which a device could do the work of a run's steps.

    training, prefill    operations / FLOP/s of one large matrix product
    decode               bytes of weights and cached keys / bandwidth of one large copy

Recomputed activations, optimizer, publishing and sampling do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace

import msgspec

from sightline.bench.harness.loop_account import LoopAccount
from sightline.bench.harness.speed import measure_bandwidth, measure_peak
from sightline.config import LoraConfig, RunFile
from sightline.config.load import load_config
from sightline.pack import CostModel, MicroBatchWork
from sightline.run.run_dir import RunDir
from sightline.trainer.model_memory import ModelMemory, measure_model
from sightline.view.inspect import read_packs
from sightline.wire.micro_batch import MicroBatch

FORWARD = 1 / 3
"""Fraction of an operation count that the forward pass takes."""
FROZEN = 2 / 3
"""Fraction for a frozen matrix in training, which gets no gradient of its own."""


@dataclass(frozen=True)
class LoopBound:
    flops: float
    """FLOP/s of one large matrix product."""
    bandwidth: float
    """Bytes per second of one large copy, read and written."""
    training_s: float
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.training_s + self.prefill_s + self.decode_s


def bound_loop(run_dir: RunDir, account: LoopAccount, warmup: int) -> LoopBound | None:
    """Return the bound of the account's steps, or None if the engine does not count its work."""
    if "computed_keys" not in account.engine:
        return None
    file = load_config(RunFile, run_dir.config)  # with the planned micro-batch size
    every = [
        micro_batch
        for _, _, _, micro_batches in read_packs(run_dir, file)
        for micro_batch in micro_batches
    ]
    packed = [micro_batch for micro_batch in every if micro_batch.step > warmup]
    model = measure_model(file.model, file.lora)
    computed = every if model.trains_tower else drop_repeated_images(every)
    trained = [micro_batch for micro_batch in computed if micro_batch.step > warmup]
    flops = measure_peak(file.trainer.device, file.model.dtype)
    bandwidth = measure_bandwidth(file.trainer.device)
    prefilled = count_prefill(account.engine, packed)
    itemsize = 4 if file.model.dtype == "float32" else 2
    decode_steps, keys = (account.engine.get(f"decode_{name}", 0.0) for name in ("steps", "keys"))
    return LoopBound(
        flops,
        bandwidth,
        price_training(model, file.lora).of(sum_work(trained)) / flops,
        FORWARD * model.price.of(prefilled) / flops,
        model.count_decode_bytes(decode_steps, keys, itemsize) / bandwidth,
    )


def drop_repeated_images(packed: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield micro-batches with only new images: a frozen tower's features can be cached."""
    encoded: set[str] = set()
    for micro_batch in packed:
        new = [entry for entry in micro_batch.items if entry.item.key not in encoded]
        encoded.update(entry.item.key for entry in new)
        yield msgspec.structs.replace(micro_batch, items=new)


def sum_work(packed: Iterable[MicroBatch]) -> MicroBatchWork:
    work = (astuple(MicroBatchWork.of(micro_batch)) for micro_batch in packed)
    return MicroBatchWork(*map(sum, zip(*work, strict=True)))


def price_training(model: ModelMemory, lora: LoraConfig) -> CostModel:
    """Return the operations of a training step for each unit of work."""
    price = model.price
    if lora.rank:
        price = replace(price, token=FROZEN * price.token, trained=FROZEN * price.trained)
        if lora.vision_targets:
            price = replace(price, patch=FROZEN * price.patch)
    if not model.trains_tower:
        patch, attended = FORWARD * price.patch, FORWARD * price.attended_patch
        price = replace(price, patch=patch, attended_patch=attended)
    return price


def count_prefill(engine: dict[str, float], packed: Iterable[MicroBatch]) -> MicroBatchWork:
    """Return the engine's work outside of decode steps. Its images have the packs' mean size."""
    sizes = [entry.item.num_patches for batch in packed for entry in batch.items]
    images = engine.get("images_encoded", 0.0) / max(len(sizes), 1)
    sampled = max(engine.get("sampled_tokens", 0.0) - engine.get("decode_tokens", 0.0), 0.0)
    return MicroBatchWork(
        tokens=round(engine["computed_tokens"]),
        attended=round(engine["computed_keys"]),
        trained=round(sampled),
        patches=round(images * sum(sizes)),
        attended_patches=round(images * sum(size * size for size in sizes)),
    )
