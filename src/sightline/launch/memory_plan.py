"""Plan the memory of a run's trainer ranks and servers, and divide a GPU that they share.

    run file + model's numbers + memory of a device --> items per process --> does it fit?

`sightline plan` prints the plan. A start uses it for settings that the run file leaves unset.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sightline.algo.algorithms import load_algorithm, load_sft_algorithm
from sightline.compute.weight_transport import find_transport
from sightline.config import AnyRun, RunFile, SftFile
from sightline.config.files import CONTEXTS_SHARE
from sightline.errors import ConfigError
from sightline.rollout.engines import load_engine
from sightline.run.machine import runs_on_cpu

if TYPE_CHECKING:
    from sightline.trainer.model_memory import BlockRow, ModelMemory

MIB = 1 << 20
GIB = 1 << 30
MAX_TOKENS, TOKEN_STEP = 16384, 1024
"""Largest planned micro-batch, and the step between sizes. Larger ones were not faster."""
KV_SHARE = 0.25
KV_ENOUGH = 12 * 10**9
"""A server needs at least this fraction of the KV cache of `max_num_seqs` full sequences, or these
bytes if they are less and hold a full sequence."""
SERVER_SHARE = 0.9
"""Fraction of a GPU without a trainer that a server uses."""
RESERVE = 0.1
"""Estimate of the allocator's unused memory, as a fraction of everything that a step frees."""
COMPILED_LOGIT, LOGIT = 12, 18
"""Bytes per logit at the head's peak: logits, log-probabilities and their gradients."""
SCORED_LOGIT = 14
"""Bytes per logit when tokens are only scored."""
MATRIX_FLOPS = 764e12
"""FLOP/s of one large bfloat16 matrix product on an H200."""
BANDWIDTH = 4.2e12
"""Bytes per second of one large copy on an H200."""
KEPT_SPEED, RECOMPUTED_SPEED = 0.60, 0.50
"""Fractions of `MATRIX_FLOPS` that compiled training steps of a 2.1B model reached."""
SAVERS: tuple[tuple[str, str, Any], ...] = (
    ("trainer", "micro_batch_tokens", None), ("inference", "gpu_memory_utilization", None),
    ("trainer", "activation_checkpointing", True), ("trainer", "master_dtype", "model"),
    ("lora", "rank", 16),
)  # fmt: skip
"""Settings that save memory. They are added in this order until the run fits."""


class StepTime(NamedTuple):
    """Upper estimate of a step's seconds, if all samples are as long as possible."""

    samples: int
    longest: int
    training_s: float
    prefill_s: float
    decode_s: float


class MicroBatchSize(NamedTuple):
    tokens: int
    patches: int
    trained: int
    """Tokens whose logprobs are computed."""


@dataclass(frozen=True)
class ProcessPlan:
    """The memory of a process in bytes, by purpose."""

    name: str
    device: str
    items: dict[str, int]
    limit: int

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class MemoryPlan:
    processes: tuple[ProcessPlan, ...]
    capacity: int
    """Bytes of one device that processes may use."""
    size: MicroBatchSize
    micro_batch_s: float
    """Estimated seconds of a full micro-batch, if the trainer has the device alone."""
    step: StepTime | None = None
    """None for supervised training."""

    @property
    def fits(self) -> bool:
        totals: Counter[str] = Counter()
        for process in self.processes:
            totals[process.device] += process.total
        within = all(process.total <= process.limit for process in self.processes)
        return within and all(total <= self.capacity for total in totals.values())


def plan_memory(
    file: RunFile | SftFile, model: ModelMemory, memory: int, on_gpu: bool = True
) -> MemoryPlan:
    """Plan the processes of `file` on devices of `memory` bytes. Micro-batches are full of images,
    and all their tokens train."""
    trainer, tokens = file.trainer, file.trainer.max_micro_batch_tokens
    patches = min(trainer.micro_batch_patches, tokens * model.patches_per_token)
    size = MicroBatchSize(tokens, patches, tokens)
    contexts = CONTEXTS_SHARE if on_gpu else 0.0
    processes = []
    for rank in range(trainer.ranks):
        share = file.get_trainer_memory_share(rank) if isinstance(file, RunFile) and on_gpu else 0
        number = trainer.device.partition(":")[2] or str(rank)
        items = plan_rank(file, model, size, rank, on_gpu)
        limit = int(memory * (share or 1 - contexts))
        name = f"trainer-{rank}" if rank else "trainer"
        processes.append(ProcessPlan(name, f"cuda:{number}" if on_gpu else "cpu", items, limit))
    if isinstance(file, RunFile):
        names = [*file.server_names, *(["evaluator"] if file.eval.every else [])]
        share = (file.server_memory_share or SERVER_SHARE) if on_gpu else 1.0
        items = plan_server(file, model, int(share * memory), on_gpu)
        for name in names:
            for gpu in file.server_gpus:
                device = f"cuda:{gpu}" if on_gpu else "cpu"
                processes.append(ProcessPlan(name, device, items, int(share * memory)))
    speed = RECOMPUTED_SPEED if trainer.activation_checkpointing else KEPT_SPEED
    price = model.price
    work = price.token * size.tokens + price.trained * size.trained + price.patch * size.patches
    seconds = work / (speed * MATRIX_FLOPS)
    step = estimate_step(file, model, seconds / size.tokens) if isinstance(file, RunFile) else None
    return MemoryPlan(tuple(processes), int(memory * (1 - contexts)), size, seconds, step)


def estimate_step(file: RunFile, model: ModelMemory, token_s: float) -> StepTime:
    """Estimate a step from the seconds that training one token takes."""
    settings, inference, longest = file.orchestrator, file.inference, _get_longest(file)
    played = settings.groups_per_step * settings.group_size
    samples = played + settings.replay_groups * settings.group_size
    engines = max(len(inference.servers or file.server_names), 1) * inference.data_parallel_size
    gpus = engines * inference.tensor_parallel_size
    turns = file.rollout.max_turns or inference.max_model_len
    sampled = min(inference.max_model_len, turns * file.rollout.max_tokens)
    # The sampled tokens come last, so each attends to everything before it.
    rounds = math.ceil(played / engines / inference.max_num_seqs)
    keys = played / engines * sampled * (inference.max_model_len - sampled / 2)
    itemsize = 4 if file.model.dtype == "float32" else 2
    decoded = model.count_decode_bytes(rounds * sampled, keys, itemsize)
    return StepTime(
        samples,
        longest,
        training_s=file.algorithm.epochs * samples * longest * token_s / file.trainer.ranks,
        prefill_s=played * inference.max_model_len * token_s / 3 / gpus,  # forward only
        decode_s=decoded / BANDWIDTH / inference.tensor_parallel_size,
    )


def plan_rank(
    file: RunFile | SftFile, model: ModelMemory, size: MicroBatchSize, rank: int, on_gpu: bool
) -> dict[str, int]:
    """Return the memory of a rank at the peak of a step, when all gradients exist."""
    trainer, ranks = file.trainer, file.trainer.ranks
    itemsize = 4 if file.model.dtype == "float32" else 2
    master = itemsize if trainer.master_dtype == "model" else 4
    is_rl = isinstance(file, RunFile)
    items = {
        "parameters": itemsize * model.parameters // ranks,
        "gradients": master * model.trained // ranks,
        "moments": 2 * master * model.trained // ranks,
    }
    if master != itemsize:
        items["float32 masters"] = master * model.trained // ranks
    if ranks > 1:  # the outer unit, a block that computes, and one that is fetched
        gathered = itemsize * (model.outside_blocks + 2 * model.largest_block)
        items["gathered parameters"] = gathered + master * model.largest_block
    needs = (load_algorithm if is_rl else load_sft_algorithm)(file.algorithm).needs
    loads_teacher = needs.teacher_logprobs and not file.algorithm.teacher_server
    if frozen := bool(needs.reference) + loads_teacher:
        items["frozen models"] = frozen * itemsize * model.parameters // ranks
    if isinstance(file, RunFile) and rank == 0 and on_gpu:
        engine = load_engine(file.inference.engine)
        if find_transport(file, has_gpu=True, can_adopt=engine.can_adopt).keeps_copy:
            items["published copy"] = itemsize * model.parameters
    # Ranks that divide the tokens encode the images of their own. All of these may train.
    tokens = -(-size.tokens // trainer.context_parallel)
    num_patches = min(size.patches, max(tokens * model.patches_per_token, 1))
    size_alone = MicroBatchSize(tokens, num_patches, min(size.trained, tokens))
    steps = plan_activations(file, model, size_alone, itemsize)
    items |= steps
    if model.tower and not model.trains_tower:
        items["feature cache"] = trainer.feature_cache_mb * MIB
    if on_gpu:
        items["allocator reserve"] = int(RESERVE * sum(steps.values()))
    return items


def plan_activations(
    file: RunFile | SftFile, model: ModelMemory, size: MicroBatchSize, itemsize: int
) -> dict[str, int]:
    """Return the memory that a micro-batch keeps for the backward pass, and its peak work space.

    The peak is in the head, in one block of the backward pass, or in scoring without gradients.
    """
    is_compiled = bool(file.trainer.compile_backend)
    recomputes = file.trainer.activation_checkpointing

    def count(rows: tuple[BlockRow, ...], keeps_attention: bool) -> tuple[int, int]:
        """Return the bytes per row that stay, and those of the block in progress."""
        kept = [row.kept_bytes(itemsize, is_compiled) for row in rows]
        if not recomputes:
            return sum(kept), max(kept, default=0)
        stays = (row.hidden + row.attention * keeps_attention for row in rows)
        return itemsize * sum(stays), 2 * max(kept, default=0)  # recomputed, and its gradients

    # Measured, not derived: a compiled text block that is recomputed keeps attention's tensors.
    per_token, block = count(model.text, is_compiled)
    per_patch, tower_block = count(model.tower, False) if model.trains_tower else (0, 0)
    text = per_token * size.tokens
    tower = (per_patch + itemsize * model.tower_outside * model.trains_tower) * size.patches
    from sightline.compute.logprobs import CHUNK_TOKENS
    from sightline.trainer.token_scores import MAX_LOGITS

    logits = min(size.trained * model.vocab, MAX_LOGITS)
    head = logits * (COMPILED_LOGIT if is_compiled else LOGIT)
    if not file.lora.rank:
        head += itemsize * model.vocab * model.hidden  # its new gradient, before it is accumulated
    scored = min(size.trained, CHUNK_TOKENS) * model.vocab * SCORED_LOGIT
    work = max(head, block * size.tokens, tower_block * size.patches - text, scored - text - tower)
    return {
        "activations": text,
        "activations of images": tower,
        "logits, work space": work,
        "pixels": model.patch_bytes * size.patches,
    }


def plan_server(file: RunFile, model: ModelMemory, limit: int, on_gpu: bool) -> dict[str, int]:
    """Return a server's memory on each GPU. Its KV cache grows to the rest of its limit."""
    inference, itemsize = file.inference, 4 if file.model.dtype == "float32" else 2
    parts = inference.tensor_parallel_size
    items = {"parameters": itemsize * model.parameters // parts}
    if on_gpu:
        from sightline.inference.torch_engine.build import SPARE_BYTES

        items["work space"] = SPARE_BYTES
    if model.tower:
        items["feature cache"] = inference.feature_cache_mb * MIB
    sequence = inference.max_model_len * itemsize * model.cached // parts
    full = inference.max_num_seqs * sequence
    needed = min(int(KV_SHARE * full), max(KV_ENOUGH, sequence))
    left = limit - sum(items.values())
    items["KV cache"] = max(needed, min(full, left)) if on_gpu else full
    return items


def divide_gpu(file: AnyRun, memory: int) -> AnyRun | None:
    """Choose the micro-batch size and the servers' share of a GPU that they share with the trainer.

    Only unset settings are chosen. Return the run file with the largest micro-batches that fit into
    `memory` bytes, or None if none fit.
    """
    if not isinstance(file, RunFile) or not file.shares_gpu:
        return file
    tokens, share = file.trainer.micro_batch_tokens, file.inference.gpu_memory_utilization
    if tokens is not None and share is not None:
        return file
    model = measure(file)
    largest = max(MAX_TOKENS, -(-_get_longest(file) // TOKEN_STEP) * TOKEN_STEP)
    for size in [tokens] if tokens else range(largest, 0, -TOKEN_STEP):
        candidate = file.with_values("trainer", micro_batch_tokens=size)
        if share is None:
            chosen = _find_share(candidate, model, memory)
            candidate = candidate.with_values("inference", gpu_memory_utilization=chosen)
        if plan_memory(candidate, model, memory).fits:
            return candidate
    return None


def _find_share(file: RunFile, model: ModelMemory, memory: int) -> float:
    """Return the fraction of a GPU for each server: what the trainer leaves, up to a full cache."""
    plan = plan_memory(file, model, memory)
    of_trainer = [p for p in plan.processes if p.name.startswith("trainer")]
    used = max(
        sum(p.total for p in of_trainer if p.device == f"cuda:{n}") for n in file.server_gpus
    )
    full = sum(plan_server(file, model, 1 << 60, True).values())
    left = math.floor(100 * (plan.capacity - used) / file.num_servers / memory)
    return max(1, min(left, math.ceil(100 * full / memory))) / 100


def find_fix(file: AnyRun, memory: int, on_gpu: bool = True) -> str:
    """Return settings that make the run fit."""
    removed, added = [], []
    for section, name, value in SAVERS:
        settings = getattr(file, section, None)
        is_saved = settings is None or getattr(settings, name) == value
        if is_saved or (section == "lora" and (file.lora.rank or file.model.exact)):
            continue
        file = file.with_values(section, **{name: value})
        if value is None:
            removed.append(f"[{section}] {name}")
        else:
            added.append(f"{section}.{name}={json.dumps(value)}")
        divided = divide_gpu(file, memory) if on_gpu else file
        if divided and plan_memory(divided, measure(divided), memory, on_gpu).fits:
            parts = [f"remove {' and '.join(removed)}"] if removed else []
            parts += [f"append {' '.join(added)}"] if added else []
            return ", and ".join(parts)
    return "use a larger device, more trainer ranks, or a smaller model"


def fill_in(file: RunFile) -> RunFile:
    """Return the run file with settings planned for the GPU of this machine, and print them."""
    numbers = file.trainer.micro_batch_tokens, file.inference.gpu_memory_utilization
    if not file.shares_gpu or None not in numbers or runs_on_cpu(file.trainer.device):
        return file
    from sightline.compute.model import read_gpu_memory

    memory = read_gpu_memory(file.trainer.device)
    divided = divide_gpu(file, memory)
    if divided is None:
        raise ConfigError(
            f"[model] path = {file.model.path!r}: trainer and servers need more than the "
            f"{memory / 1e9:.0f} GB of their GPU. `sightline plan` prints what each holds",
            find_fix(file, memory),
        )
    print(describe_choice(divided))
    return divided


def describe_choice(file: RunFile) -> str:
    tokens = file.trainer.max_micro_batch_tokens
    is_short = tokens < _get_longest(file)
    warning = f". A sample of more than {tokens} tokens may not fit" if is_short else ""
    return (
        f"planned: [trainer] micro_batch_tokens = {tokens}, [inference] "
        f"gpu_memory_utilization = {file.inference.gpu_memory_utilization}{warning}"
    )


def _get_longest(file: RunFile) -> int:
    """Return the length of the longest sample that the run can have."""
    return file.trainer.max_sequence_tokens or file.inference.max_model_len


def measure(file: RunFile | SftFile) -> ModelMemory:
    from sightline.trainer.model_memory import measure_model

    return measure_model(file.model, file.lora)
