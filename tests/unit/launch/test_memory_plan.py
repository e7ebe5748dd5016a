"""`sightline plan`: the planned memory against what torch holds and what an H200 measured."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import making
import numpy as np
import published
import pytest
import torch
from PIL import Image

from sightline.algo.algorithms import Supervised
from sightline.cli.main import main
from sightline.compute.attention import build_attention_pattern
from sightline.compute.model import MODEL_DTYPES, load_model
from sightline.config import RunFile, SftFile, validate_config
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.launch import memory_plan
from sightline.launch.memory_plan import MicroBatchSize, plan_memory, plan_rank
from sightline.media import MediaStore
from sightline.trainer.build import build_conversations, build_pixels
from sightline.trainer.feed import BatchPrefetcher
from sightline.trainer.model_memory import ModelMemory, measure_block

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("**/*.toml"))
H200 = 141 * 10**9
GIB = 1 << 30
DENSE = MicroBatchSize(16344, 32768, 2048)
"""Half of the batch of `bench step --part dense`."""
ROLLOUTS = MicroBatchSize(12208, 38400, 2048)
"""Eight rollouts of `bench loop`: four images of 640x480, four answers of 64 tokens."""
RECOMPUTED = {"activation_checkpointing": True}
MODEL = {"master_dtype": "model"}
LORA = {"lora": {"rank": 16, "publish": "merged"}, "model": {"train_vision": False}}
MEASURED: tuple[tuple[str, dict[str, Any], dict[str, Any], MicroBatchSize, float], ...] = (
    ("2b", {}, {}, DENSE, 99 * GIB),
    ("2b", RECOMPUTED, {}, DENSE, 48 * GIB),
    ("2b", MODEL, {}, DENSE, 79.2 * GIB),
    ("2b", RECOMPUTED | MODEL, {}, DENSE, 28.3 * GIB),
    ("2b", RECOMPUTED | MODEL, {}, MicroBatchSize(15600, 57720, 1000), 29.2 * GIB),
    ("2b", RECOMPUTED | MODEL, {}, MicroBatchSize(16384, 11544, 1050), 25.8 * GIB),
    ("4b", RECOMPUTED, {}, ROLLOUTS, 106e9),
    # The settings of this run were not recorded.
    ("8b", RECOMPUTED | MODEL, LORA, ROLLOUTS, 52e9),
)
"""Shape, [trainer], other sections, micro-batch, and peak bytes on one H200 (docs/memory.md)."""
SINGLE_STEPS = 6
"""The first rows are from `bench step`, which publishes nothing."""


def build_file(path: Path, own: dict[str, Any], **sections: dict[str, Any]) -> RunFile:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "env": {"name": "color_codeword"},
        "trainer": {"device": "cuda", "compile_backend": "inductor", **own},
        "inference": {"device": "cuda", "max_num_seqs": 128},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return validate_config(RunFile, values, "test")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shapes")
    return {name: published.write_shape(name, root / name) for name in published.SHAPES}


@pytest.mark.parametrize("number", range(len(MEASURED)))
def test_planned_peaks_are_within_ten_percent_of_measured_ones(
    number: int, folders: dict[str, Path]
) -> None:
    shape, trainer, sections, size, measured = MEASURED[number]
    file = build_file(folders[shape], trainer, **sections)
    items = plan_rank(file, memory_plan.measure(file), size, 0, on_gpu=True)
    left_out = {"allocator reserve"} | ({"published copy"} if number < SINGLE_STEPS else set())
    planned = sum(num_bytes for item, num_bytes in items.items() if item not in left_out)
    print(f"{shape} {trainer}: {planned / 1e9:.1f} of {measured / 1e9:.1f} GB")
    assert planned == pytest.approx(measured, rel=0.1)


def test_an_expert_model_counts_all_parameters_and_the_work_of_active_experts(
    folders: dict[str, Path],
) -> None:
    model = memory_plan.measure(build_file(folders["30b-a3b"], {}))
    assert model.parameters == pytest.approx(31.1e9, rel=0.01)
    assert model.price.token == pytest.approx(6 * 2.7e9, rel=0.1)
    row = model.text[0]
    experts = 8 * (2048 + 2 * 768 + 768 + 2048)
    assert row.products > experts


# --- what torch holds


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> SftFile:
    lines = []
    for i in range(2):
        Image.new("RGB", (64, 64), (i, 9, 0)).save(tmp_path / f"{i}.png")
        talk = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is"}]},
            {"role": "assistant", "content": "A"},
        ]
        lines.append(json.dumps({"messages": talk, "images": [f"{i}.png"]}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    return SftFile.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "data": {"path": str(tmp_path / "talks.jsonl")},
            "sft": {"output_dir": str(tmp_path / "out"), "batch_size": 2},
            "run": {"steps": 1},
            "media": {"root": str(tmp_path / "media")},
            "trainer": {"device": "cpu"},
        }
    )


@pytest.mark.parametrize("rank", [0, 4])
def test_a_step_on_the_cpu_holds_exactly_the_planned_state(config: SftFile, rank: int) -> None:
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": rank})})
    store = MediaStore(Path(config.media.root))
    learner = making.build_learner(
        config.model, config.trainer, store, 1, algorithm=Supervised(config.algorithm),
        lora=config.lora,
    )  # fmt: skip
    for ready in BatchPrefetcher(
        build_conversations(config, learner, build_pixels(learner, store))
    ):
        learner.step(ready)
    parameters = list(learner.forward.model.parameters())
    held = {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "moments": sum(
            state[key].nbytes
            for state in learner.optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        ),
    }
    size = MicroBatchSize(64, 64, 64)
    planned = plan_rank(config, memory_plan.measure(config), size, 0, on_gpu=False)
    assert held == {item: planned[item] for item in held}
    assert not {"gathered parameters", "float32 masters"} & set(planned)


def count_saved(run: Callable[[], object], parameters: Iterator[torch.Tensor]) -> int:
    """Return the bytes that autograd keeps of a forward pass, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_blocks_keep_the_planned_activations(dtype: str, tmp_path: Path) -> None:
    widths = {"hidden": 256, "intermediate": 768, "vision_hidden": 256, "vision_intermediate": 768}
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type="qwen3_vl", **widths)
    forward = load_model(tmp_path / "model", load_family(tmp_path / "model"), "cpu", dtype)
    kind, tokens = MODEL_DTYPES[dtype], 512
    angles = torch.randn(1, tokens, forward.blocks()[0].self_attn.head_dim, dtype=kind)  # type: ignore[union-attr]
    pattern = build_attention_pattern(np.full(tokens, tokens), torch.device("cpu"), kind)
    first, last = forward.blocks()[0], forward.blocks()[-1]
    x = torch.randn(1, tokens, 256, dtype=kind, requires_grad=True)
    kept = count_saved(
        lambda: first(
            x, position_embeddings=(angles, angles), attention_mask=None, pattern=pattern
        ),
        forward.model.parameters(),
    )
    planned = tokens * measure_block(first, 1).kept_bytes(kind.itemsize, is_compiled=False)
    assert planned == pytest.approx(kept, rel=0.1)
    width = int(last.attn.qkv.in_features)  # type: ignore[union-attr]
    patches = torch.randn(tokens, width, dtype=kind, requires_grad=True)
    turned = torch.randn(tokens, int(last.attn.head_dim))  # type: ignore[union-attr]
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    kept = count_saved(
        lambda: last(
            patches, cu_seqlens=ends, position_embeddings=(turned, turned), max_seqlen=tokens
        ),
        forward.model.parameters(),
    )
    planned = tokens * measure_block(last, 1).kept_bytes(kind.itemsize, is_compiled=False)
    assert planned == pytest.approx(kept, rel=0.1)


# --- the division of a GPU


def divide(file: RunFile, memory: int = H200) -> RunFile | None:
    divided = memory_plan.divide_gpu(file, memory)
    assert divided is None or isinstance(divided, RunFile)
    return divided


def test_a_shared_gpu_is_divided_so_that_both_processes_fit(folders: dict[str, Path]) -> None:
    file = build_file(folders["4b"], RECOMPUTED)
    divided = divide(file)
    assert divided is not None
    tokens, share = divided.trainer.micro_batch_tokens, divided.server_memory_share
    assert tokens is not None and 12288 <= tokens <= memory_plan.MAX_TOKENS
    assert 0.1 < share < 0.25
    model = memory_plan.measure(divided)
    plan = plan_memory(divided, model, H200)
    assert plan.fits
    assert {process.device for process in plan.processes} == {"cuda:0"}
    larger = RECOMPUTED | {"micro_batch_tokens": tokens + memory_plan.TOKEN_STEP}
    assert tokens < memory_plan.MAX_TOKENS and divide(build_file(folders["4b"], larger)) is None


def test_samples_longer_than_the_planned_micro_batches_are_named(folders: dict[str, Path]) -> None:
    short = divide(build_file(folders["4b"], RECOMPUTED))
    long = divide(build_file(folders["4b"], RECOMPUTED, inference={"max_model_len": 32768}))
    assert short is not None and "may not fit" not in memory_plan.describe_choice(short)
    assert long is not None and long.trainer.max_micro_batch_tokens < 32768
    assert "tokens may not fit" in memory_plan.describe_choice(long)


def test_settings_of_the_run_file_are_kept(folders: dict[str, Path]) -> None:
    numbers = RECOMPUTED | {"micro_batch_tokens": 2048}
    file = build_file(folders["4b"], numbers, inference={"gpu_memory_utilization": 0.25})
    assert divide(file) is file
    file = build_file(folders["4b"], numbers)
    divided = divide(file)
    assert divided is not None and divided.trainer.micro_batch_tokens == 2048
    assert divided.inference.gpu_memory_utilization is not None


@pytest.mark.parametrize(
    "sections",
    [
        {"inference": {"device": "cuda:1"}},
        {"inference": {"servers": ["http://a:1"]}},
        {"trainer": {"device": "cpu"}},
    ],
)
def test_only_a_shared_gpu_is_divided(
    sections: dict[str, dict[str, Any]], folders: dict[str, Path]
) -> None:
    file = build_file(folders["2b"], {}, **sections)
    assert divide(file) is file
    assert file.trainer.max_micro_batch_tokens == 8192


def test_a_run_that_does_not_fit_gets_settings_with_which_it_does(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'[model]\npath = "{folders["8b"]}"\ndtype = "bfloat16"\n[env]\nname = "color_codeword"\n'
        '[trainer]\ndevice = "cuda"\ncompile_backend = "inductor"\n[inference]\ndevice = "cuda"\n'
    )
    words = ["plan", str(run_file), "--gpu-gb", "141"]
    assert main([*words[:2], "--gpu-gb", "nan"]) == 2
    assert "nan is not a size" in capsys.readouterr().err
    assert main(words) == 1
    printed = capsys.readouterr().out
    fix = printed.partition("does not fit: append ")[2].split()
    assert fix[0] == "trainer.activation_checkpointing=true"
    assert main([*words, *fix]) == 0
    printed = capsys.readouterr().out
    assert "published copy" in printed and "a step of 128 samples of 2,048 tokens: at" in printed


def test_ranks_that_divide_the_tokens_hold_their_part(folders: dict[str, Path]) -> None:
    def plan(context: int, tokens: int) -> dict[str, int]:
        file = build_file(folders["2b"], RECOMPUTED | {"ranks": 4, "context_parallel": context})
        size = MicroBatchSize(tokens, 4 * tokens, tokens)
        return plan_rank(file, memory_plan.measure(file), size, 0, on_gpu=True)

    assert plan(4, 65536) == plan(1, 16384)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "data_parallel_size"])
def test_a_server_on_several_gpus_is_planned_on_each(size: str, folders: dict[str, Path]) -> None:
    vllm = {"engine": "vllm", size: 2}
    file = build_file(folders["2b"], {"device": "cuda:1"}, inference=vllm)
    assert file.shares_gpu and file.server_gpus == range(2)
    file = file.with_values("inference", gpu_memory_utilization=0.3)
    model = memory_plan.measure(file)
    processes = plan_memory(file, model, H200).processes
    assert [(process.name, process.device) for process in processes] == [
        ("trainer", "cuda:1"), ("server", "cuda:0"), ("server", "cuda:1"),
    ]  # fmt: skip
    parts = 2 if size == "tensor_parallel_size" else 1
    assert processes[1].items["parameters"] == 2 * model.parameters // parts
    assert processes[0].limit == int(H200 * file.get_trainer_memory_share(0)) < H200 * 0.7
    far = build_file(folders["2b"], {"device": "cuda:2"}, inference=vllm)
    assert not far.shares_gpu


def test_a_step_takes_at_most_the_time_of_the_longest_samples(folders: dict[str, Path]) -> None:
    batch = {"groups_per_step": 8, "group_size": 8, "replay_groups": 2}
    file = build_file(
        folders["2b"], {"micro_batch_tokens": 4096}, orchestrator=batch,
        rollout={"max_turns": 4, "max_tokens": 100}, inference={"max_model_len": 1024},
    )  # fmt: skip
    model = memory_plan.measure(file)
    plan = plan_memory(file, model, H200)
    step = plan.step
    assert step is not None and (step.samples, step.longest) == (80, 1024)
    assert step.training_s == pytest.approx(80 * 1024 / 4096 * plan.micro_batch_s)
    assert step.prefill_s == pytest.approx(64 * 1024 / 4096 * plan.micro_batch_s / 3)
    # 400 decode steps of 64 rows, whose first token attends to 624 tokens and whose last to 1024.
    decoded = model.count_decode_bytes(400, 64 * 400 * 824, 2)
    assert step.decode_s == pytest.approx(decoded / 4.2e12)
    halved = plan_memory(file.with_values("trainer", ranks=2), model, H200).step
    assert halved is not None and halved.training_s == pytest.approx(step.training_s / 2)


# --- the examples


@pytest.mark.thorough
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_example_can_be_planned(
    path: Path,
    folders: dict[str, Path],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Published shapes where they are known, and tiny checkpoints for the others."""
    name = Path(tomllib.loads(path.read_text())["model"]["path"]).name.lower()
    known = [folder for shape, folder in folders.items() if f"vl-{shape}" in name]
    stand_in = known[0] if known else tiny_model
    if path.stem.startswith("kimi"):
        write_tiny("kimi_k25", stand_in := tmp_path / "tiny", seed=0)
    assert main(["plan", str(path), f"model.path={stand_in}", "--gpu-gb", "141"]) == 0
    printed = capsys.readouterr().out
    assert "parameters" in printed and "micro-batches of" in printed
    assert ("a step of" in printed) == ("[env" in path.read_text())


def test_the_state_of_ranks_is_divided(folders: dict[str, Path]) -> None:
    def plan(ranks: int) -> tuple[ModelMemory, dict[str, int]]:
        file = build_file(folders["2b"], {"ranks": ranks})
        model = memory_plan.measure(file)
        return model, plan_rank(file, model, DENSE, ranks - 1, on_gpu=True)

    (model, alone), (_, shared) = plan(1), plan(4)
    assert alone["moments"] == 8 * model.parameters
    assert [shared[item] for item in ("parameters", "moments")] == [
        alone[item] // 4 for item in ("parameters", "moments")
    ]
    assert "gathered parameters" in shared and "gathered parameters" not in alone
