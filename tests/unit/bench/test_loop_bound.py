"""`bench loop`: the bound of a run's steps, from its batches and the engine's counts."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import making
import msgspec
import pytest

from sightline.bench.harness.loop_account import LoopAccount
from sightline.bench.harness.loop_bound import (
    bound_loop,
    count_prefill,
    price_training,
    sum_work,
)
from sightline.bench.loop import show
from sightline.config import LoraConfig, ModelConfig, RunFile, dump_toml
from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pack import CostModel, MicroBatchWork, PackSize, pack, truncate
from sightline.run import RunDir
from sightline.trainer.model_memory import ModelMemory, measure_model
from sightline.wire.sample import Batch, digest_batch

COUNTS = {
    "computed_tokens": 500.0, "computed_keys": 40_000.0, "images_encoded": 6.0,
    "sampled_tokens": 130.0, "decode_tokens": 90.0, "decode_steps": 30.0, "decode_keys": 9_000.0,
    "decode_seconds": 0.3,
}  # fmt: skip
ACCOUNT = LoopAccount(
    began=100.0, ended=120.0, wall_s=14.0, step_s=[6.0, 5.0, 9.0], tokens_sampled=130,
    tokens_computed=1000, tokens_trained=130, compilations=0, seconds={}, engine=COUNTS,
    in_use_s=None, adopt_s=None,
)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, tiny_model: Path) -> RunDir:
    """Three steps, with the batches that the trainer received."""
    new_run_dir = RunDir(tmp_path / "run")
    new_run_dir.make()
    values = {
        "model": {"path": str(tiny_model)},
        "env": {"name": "color_codeword"},
        "trainer": {"device": "cpu", "micro_batch_tokens": 200},
    }
    new_run_dir.config.write_text(dump_toml(RunFile.model_validate(values)))
    with new_run_dir.ledger.open("a") as ledger:
        for step in (1, 2, 3):
            samples = making.samples(tiny_model, MediaStore(new_run_dir.media), 4, seed=step)
            raw = Batch(step, samples).to_bytes()
            new_run_dir.batch(step).write_bytes(raw)
            ledger.write(json.dumps({"step": step, "batch": digest_batch(raw)}) + "\n")
    return new_run_dir


@pytest.fixture
def model(tiny_model: Path) -> ModelMemory:
    return measure_model(ModelConfig(path=str(tiny_model)), LoraConfig())


def test_bound_counts_the_steps_after_the_warm_up(
    run_dir: RunDir, model: ModelMemory, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = bound_loop(run_dir, ACCOUNT, warmup=1)
    assert bound is not None and bound.flops > 1e8 and bound.bandwidth > 1e8
    family = load_family(tiny_model)
    packed = [
        micro_batch
        for step in (2, 3)
        for batch in [Batch.from_bytes(run_dir.batch(step).read_bytes())]
        for micro_batch in pack(batch.samples, step, family, PackSize(200, 1 << 20))
    ]
    trained = sum(model.price.of(MicroBatchWork.of(micro_batch)) for micro_batch in packed)
    assert bound.training_s * bound.flops == pytest.approx(trained)
    prefilled = model.price.of(count_prefill(COUNTS, packed)) / 3
    assert bound.prefill_s * bound.flops == pytest.approx(prefilled)
    decoded = model.count_decode_bytes(30, 9_000, itemsize=4)
    assert bound.decode_s * bound.bandwidth == pytest.approx(decoded)
    limits = {"bound": asdict(bound), "warmup": 1, "start_s": 1.0, "end_s": 2.0}
    show({**asdict(ACCOUNT), **limits})
    share = f"{(bound.training_s + bound.prefill_s + bound.decode_s) / 14:.1%} of the time"
    assert share in capsys.readouterr().out


def test_bound_does_not_exceed_the_work_of_a_frozen_tower_and_of_cut_samples(
    run_dir: RunDir, tiny_model: Path
) -> None:
    values = tomllib.loads(run_dir.config.read_text())
    values["model"]["train_vision"] = False
    values["trainer"]["max_sequence_tokens"] = 60
    run_dir.config.write_text(dump_toml(file := RunFile.model_validate(values)))
    raw = run_dir.batch(1).read_bytes()  # step 3 shows the images of step 1 again
    again = msgspec.structs.replace(Batch.from_bytes(raw), step=3).to_bytes()
    run_dir.batch(3).write_bytes(again)
    lines = [json.loads(line) for line in run_dir.ledger.read_text().splitlines()]
    lines[2]["batch"] = digest_batch(again)
    run_dir.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bound = bound_loop(run_dir, ACCOUNT, warmup=1)
    packed = {
        batch.step: pack(
            truncate(batch.samples, 60)[0],
            batch.step,
            load_family(tiny_model),
            PackSize(200, 1 << 20),
        )
        for batch in (Batch.from_bytes(run_dir.batch(step).read_bytes()) for step in (2, 3))
    }
    entries = [entry.item for micro_batch in packed[2] for entry in micro_batch.items]
    sizes = [item.num_patches for item in {item.key: item for item in entries}.values()]
    work = replace(
        sum_work([*packed[2], *packed[3]]),
        patches=sum(sizes), attended_patches=sum(size * size for size in sizes),
    )  # fmt: skip
    price = price_training(measure_model(file.model, file.lora), file.lora)
    assert bound is not None and sizes
    assert bound.training_s * bound.flops == pytest.approx(price.of(work))


def test_prefill_has_the_tokens_and_images_outside_of_decode_steps(
    run_dir: RunDir, tiny_model: Path
) -> None:
    samples = making.samples(tiny_model, MediaStore(run_dir.media), 4)
    packed = pack(samples, 1, load_family(tiny_model), PackSize(1 << 20, 1 << 20))
    sizes = [entry.item.num_patches for entry in packed[0].items]
    assert len(packed) == 1 and len(set(sizes)) > 1
    work = count_prefill(COUNTS | {"images_encoded": 2.0 * len(sizes)}, packed)
    assert work == MicroBatchWork(
        tokens=500, attended=40_000, trained=40, patches=2 * sum(sizes),
        attended_patches=2 * sum(size * size for size in sizes),
    )  # fmt: skip
    assert sum_work([packed[0], packed[0]]).tokens == 2 * len(packed[0].token_ids)


def test_decode_steps_read_the_text_weights_and_the_cached_keys(
    model: ModelMemory, tiny_model: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    whole = AutoModelForImageTextToText.from_pretrained(tiny_model)
    text, config = whole.model.language_model, whole.config.text_config
    matrices = sum(p.numel() for block in text.layers for p in block.parameters() if p.ndim == 2)
    weights = 4 * (matrices + whole.get_output_embeddings().weight.numel())
    cached = 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    assert model.count_decode_bytes(30, 9_000, itemsize=4) == 30 * weights + 9_000 * cached


def test_frozen_weights_have_cheaper_training(model: ModelMemory) -> None:
    model = replace(model, price=CostModel(6, 12, 6, 6, 12), trains_tower=True)
    assert price_training(model, LoraConfig()) == model.price
    adapters = LoraConfig(rank=4)
    assert price_training(model, adapters) == CostModel(4, 12, 4, 6, 12)
    of_both = LoraConfig(rank=4, vision_targets=("qkv",))
    assert price_training(model, of_both) == CostModel(4, 12, 4, 4, 12)
    frozen = replace(model, trains_tower=False)
    assert price_training(frozen, adapters) == CostModel(4, 12, 4, 2, 4)


def test_engine_without_these_counts_has_no_bound(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    account = replace(ACCOUNT, engine={"steps": 7.0})
    assert bound_loop(run_dir, account, warmup=1) is None
    show({**asdict(account), "bound": None, "warmup": 1, "start_s": 1.0, "end_s": 2.0})
    assert "bound:" not in capsys.readouterr().out
