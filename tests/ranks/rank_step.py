r"""One rank of a trainer that takes one step and writes the results.

python rank_step.py RANK SIZE MEET CHANNEL MODEL STORE OUT \
    [frozen|lora|lost|kept|one|with_text|probe|blind|critic|context=N|expert=N|tensor=N|routes|
     saved|from=FOLDER]

`saved` writes a checkpoint after the step. `from` restores one instead of taking a step, and writes
it again.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)

import making  # noqa: E402

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch  # noqa: E402
from sightline.algo.losses import LossInputs  # noqa: E402
from sightline.algo.needs import Needs  # noqa: E402
from sightline.compute.tensor_file import iterate_gathered  # noqa: E402
from sightline.config import AlgorithmConfig, LoraConfig  # noqa: E402
from sightline.media import MediaStore  # noqa: E402
from sightline.message import assistant, user  # noqa: E402
from sightline.pack import PackSize  # noqa: E402
from sightline.trainer.bad_media import BadMediaPolicy  # noqa: E402
from sightline.trainer.build import build_pixels  # noqa: E402
from sightline.trainer.distribute import distribute, estimate_price, read_shares  # noqa: E402
from sightline.trainer.feed import BatchPreparer  # noqa: E402
from sightline.trainer.lora import build_merge_gather, plain_parameters  # noqa: E402
from sightline.trainer.probe import pick_probe_micro_batch  # noqa: E402
from sightline.trainer.ranks import FollowerChannel, LeadChannel, RankInfo  # noqa: E402
from sightline.trainer.sft import build_sample  # noqa: E402
from sightline.trainer.shard import full_tensor  # noqa: E402
from sightline.trainer.snapshot import ShardReader, restore, take_snapshot  # noqa: E402
from sightline.wire.sample import Batch  # noqa: E402


class Critic(Algorithm):
    """Advantages depend on values, which ranks compute and rank 0 collects."""

    needs = Needs(values=True)

    def build_value_head(self, hidden_size: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(hidden_size, 1), torch.nn.Flatten(0))

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        return [s.reward - v for s, v in zip(batch.samples, batch.values, strict=True)]

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        error = (tokens.values - 0.5) ** 2
        policy_loss = -tokens.importance_ratios() * tokens.advantages
        return AlgorithmLoss(policy_loss + error, {"value_loss": error})


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    ranks = RankInfo(rank, size, sys.argv[3], sys.argv[4], "secret")
    model, store, out = Path(sys.argv[5]), MediaStore(Path(sys.argv[6])), Path(sys.argv[7])
    frozen = "frozen" in sys.argv[8:]
    words = sys.argv[8:]
    divided = dict(word.split("=") for word in words if "=" in word)
    trainer = making.trainer_config(
        lr=1e-4 if "critic" in words else 1e-2,
        max_grad_norm=1e9,
        activation_checkpointing="recompute" in words,
        compile_backend="aot_eager" if "compile" in words else "",
        ranks=size,
        context_parallel=int(divided.get("context", 1)),
        expert_parallel=int(divided.get("expert", 1)),
        tensor_parallel=int(divided.get("tensor", 1)),
    )
    lora = LoraConfig(rank=4, vision_targets=("*",)) if "lora" in words else LoraConfig()
    dtype = "bfloat16" if "mixed" in words else "float32"
    settings = making.model_config(model, train_vision=not frozen, dtype=dtype)
    algorithm = making.algorithm(kl_coef=0.1)
    if "critic" in words:
        algorithm = Critic(AlgorithmConfig(epochs=2, minibatches=2))
    learner = making.build_learner(
        settings, trainer, store, 10, ranks, algorithm=algorithm, lora=lora
    )
    # The reference is the model itself, so a KL of 0 would prove nothing.
    with torch.no_grad():
        for name, parameter in learner.forward.model.named_parameters():
            master = learner.optimizer.get_master(parameter)
            master.mul_(1.01)
            if "lora_B" in name:
                master.add_(0.01)  # at zero, A would have no gradient
        learner.optimizer.round_masters()
    if "from" in divided:
        files = sorted(Path(divided["from"]).glob("saved*.safetensors"))
        model_of, optimizer = learner.forward.model, learner.optimizer
        restore(ShardReader(files), model_of, optimizer, learner.dims, files[0])
        save(learner, out)
        return
    counts = watch_blocks(learner.forward.blocks())
    pixels = build_pixels(learner, store)
    materializer = pixels.materializer
    ready = next(iter(feed(learner, ranks, model, store, pixels)))
    if "blind" in words:  # pixels that are lost on the way: every image is the same grey
        ready.micro_batches[:] = [
            m if m.made is None else replace(m, made=np.full_like(m.made, 127))
            for m in ready.with_pixels().micro_batches
        ]
    micro_batch = pick_probe_micro_batch(ready.micro_batches)
    num_decoded = [m.made for m in ready.with_pixels().micro_batches]
    patches = [one for one in num_decoded if one is not None]
    tensors: dict[str, torch.Tensor] = {}
    num_updates = 0

    def note(*_: object) -> None:
        nonlocal num_updates
        num_updates += 1
        for name, parameter in learner.forward.model.named_parameters():
            if (gradient := learner.optimizer.get_master(parameter).grad) is not None:
                tensors[name] = full_tensor(gradient).detach().clone()

    learner.optimizer.register_step_pre_hook(note)
    learner.diagnostics_every = int("probe" in words)
    stepped = learner.step(ready)
    passes = [counts["outer"]]
    if "saved" in words:
        save(learner, out)
    if frozen:
        learner.step(replace(ready, step=2))
        passes.append(counts["outer"] - passes[0])
    plain, gather = (
        plain_parameters(learner.forward.model),
        build_merge_gather(learner.forward.model),
    )
    after = {f"after.{name}": whole for name, whole in iterate_gathered(plain, gather)}
    if "mixed" in words:
        for name, parameter in plain.items():
            master = learner.optimizer.get_master(parameter)
            after[f"after.master.{name}"] = full_tensor(master.detach())
    local = sum(_local_bytes(p) for p in learner.forward.model.parameters())
    note_rank = {
        "bytes": local,
        "units": units(learner),
        "ways": ways(counts),
        "passes": passes,
        "kept": 0 if learner.features is None else len(learner.features.cache),
        "made": materializer.counts.made,
        "images": ready.num_items,
        "asked": None if micro_batch is None else micro_batch[0],
        "shows": [bool(m.batch.items) for m in ready.micro_batches],
        "patches": sum(len(p) for p in patches),
        "updates": num_updates,
        "context": learner.dims.context_group.size() if learner.dims.context_group else 1,
    }
    (out / f"rank{rank}.json").write_text(json.dumps(note_rank))
    if ranks.is_lead:
        save_file(
            {k: v.contiguous() for k, v in (tensors | after).items()}, out / "found.safetensors"
        )
        figures = {k: v for k, v in stepped.metrics.items() if k != "compute_s"}
        figures["probe"] = None if stepped.probe is None else asdict(stepped.probe)
        (out / "metrics.json").write_text(json.dumps(figures))
        scores = stepped.scores
        named = [
            (o.trace_id, o.node, scores.logprobs.numpy()[o.start : o.stop].tolist())
            for o in scores.origins
        ]
        (out / "scores.json").write_text(json.dumps(sorted(named)))


def save(learner, out: Path) -> None:  # type: ignore[no-untyped-def]
    snapshot = take_snapshot(learner.forward.model, learner.optimizer, learner.dims)
    snapshot.write(out, f"saved{learner.dims.rank}")


def watch_blocks(blocks: list[torch.nn.Module]) -> Counter[str]:
    """Counts calls of blocks, and of what each has inside: more of those were computed again."""
    counts: Counter[str] = Counter()
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: counts.update(["outer"]))
        inner = next(block.children())
        inner.register_forward_pre_hook(lambda *_: counts.update(["inner"]))
    return counts


def ways(counts: Counter[str]) -> list[str]:
    from torch._dynamo.utils import counters

    modes = ["compile"] if counters["stats"]["unique_graphs"] else []
    return [*modes, *(["recompute"] if counts["inner"] == 2 * counts["outer"] else [])]


def units(learner) -> list[bool]:  # type: ignore[no-untyped-def]
    """Return for every block, and for the rest, whether it is gathered as a unit of its own."""
    if learner.sharded is None:
        return []
    return [
        isinstance(module, FSDPModule) for module in (*learner.forward.blocks(), learner.sharded)
    ]


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() * local.element_size()


def feed(learner, ranks, model, store, pixels):  # type: ignore[no-untyped-def]
    family = learner.family
    if not ranks.is_lead:
        follow = FollowerChannel(ranks)
        follow.report_ready()
        return read_shares(follow, pixels, family.num_axes, learner.dims.context)
    batch = Batch(1, with_loss(samples(model, store), store))
    if "routes" in sys.argv:
        layers = learner.forward.routing.num_layers
        routed = [making.with_routes(sample, layers) for sample in batch.samples]
        batch = Batch(1, routed)
    limit = PackSize(1 << 20, 1 << 20) if "one" in sys.argv else PackSize(160, 4096)
    if "with_text" in sys.argv:  # one sample with images, and one of text only
        seeing = next(sample for sample in batch.samples if sample.items)
        batch, limit = Batch(1, [seeing, batch.samples[-1]]), PackSize(1, 1)
    preparer = BatchPreparer(pixels, limit, BadMediaPolicy(max_bad_fraction=0.5))
    if "critic" in sys.argv:
        preparer.algorithm = learner.algorithm
        preparer.num_minibatches = learner.algorithm.settings.minibatches
        batch = Batch(1, [structs.replace(s, advantages=None) for s in batch.samples])
    ready = preparer.prepare(batch, "digest")
    assert len(ready.dropped) == ("lost" in sys.argv) * 1
    num = len(ready.micro_batches)
    assert num == 1 if "one" in sys.argv else num == 2 if "with_text" in sys.argv else num >= 3, num
    if ranks.size == 1:
        return [ready]
    lead = LeadChannel(ranks)
    lead.wait_until_loaded()
    price = estimate_price(learner.forward)
    return [distribute(ready, lead, learner.dims, price)]


def with_loss(all_samples, store):  # type: ignore[no-untyped-def]
    """Lose an image of one sample (`lost`), or drop that sample and keep the image (`kept`)."""
    num_uses = Counter(item.ref.digest for sample in all_samples for item in sample.items)
    once = next(digest for digest, count in num_uses.items() if count == 1)
    if "lost" in sys.argv:
        store.path(once).unlink()
    if "kept" in sys.argv:
        all_samples = [s for s in all_samples if all(item.ref.digest != once for item in s.items)]
    return all_samples


def samples(model: Path, store: MediaStore):  # type: ignore[no-untyped-def]
    """Return samples with images and text-only samples, so that some ranks have no image."""
    from sightline.families import load_renderer

    renderer = load_renderer(model, store)
    all_samples = making.samples(model, store, 5)
    talks = [[user(f"say {word} again"), assistant(word * 9)] for word in ("yes", "no", "maybe")]
    return [
        *all_samples,
        *(build_sample(talk, renderer, f"text.{i}") for i, talk in enumerate(talks)),
    ]


if __name__ == "__main__":
    main()
    import atexit
    import os

    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
