"""Constructs the trainer's parts from a run file. No flow here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sightline.algo.losses import load_loss
from sightline.algo.losses import supervised as supervised_loss
from sightline.algo.registry import load_aggregation
from sightline.compute.broadcast import Broadcaster
from sightline.compute.feature_cache import FeatureCache
from sightline.compute.model import MODEL_DTYPES, load_model, pick_device
from sightline.config import LoraConfig, MediaConfig, ModelConfig, RunFile, SftFile, TrainerConfig
from sightline.errors import ResumeRefused
from sightline.families import Forward, load_family, load_renderer
from sightline.families.device_copy import stack_pinned
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.run import EventLog, RunDir
from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.blocks import wrap_blocks
from sightline.trainer.checkpoint import CheckpointStore, ResumePoint
from sightline.trainer.checkpoint_saver import (
    CheckpointSaver,
    collect_from_ranks,
    deliver_alone,
    deliver_to_lead,
)
from sightline.trainer.distribute import BatchDistributor, ShareFeed
from sightline.trainer.features import FrozenTowerFeatures, has_frozen_tower
from sightline.trainer.feed import BatchFeed, BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.ledger import Ledger, read_ledger
from sightline.trainer.loop import TrainerComponents
from sightline.trainer.lora import NO_ADAPTERS, add_adapters, describe_adapter_base
from sightline.trainer.optimizer import build_optimizer, freeze_vision
from sightline.trainer.price import estimate_price
from sightline.trainer.publish import AsyncPublisher, BroadcastPublisher, FilePublisher, Publisher
from sightline.trainer.ranks import SINGLE_RANK, FollowerChannel, LeadChannel, RankInfo
from sightline.trainer.run_writer import FollowerRunWriter, LeadRunWriter
from sightline.trainer.shard import all_gather_list, join_process_group, shard_model
from sightline.trainer.snapshot import restore
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog
from sightline.wire.control import BatchReady, ControlMessage
from sightline.wire.weights import Adapter, WeightFile

MEGABYTE = 1 << 20


def pick_rank_device(name: str, ranks: RankInfo) -> torch.device:
    """Where a rank computes; ranks of one machine take its GPUs in turn."""
    device = torch.device(pick_device(name))
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", ranks.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def build_learner(
    model: ModelConfig,
    trainer: TrainerConfig,
    store: MediaStore,
    steps: int,
    ranks: RankInfo = SINGLE_RANK,
    supervised: bool = False,
    lora: LoraConfig = NO_ADAPTERS,
    seed: int = 0,
) -> Learner:
    device = pick_rank_device(trainer.device, ranks)
    master = model.dtype if trainer.master_dtype == "model" else "float32"
    is_mixed = master != model.dtype
    if ranks.size > 1 or is_mixed:
        join_process_group(ranks, device)
    family = load_family(model.path, **model.overrides())
    renderer = load_renderer(model.path, store, family)
    forward = load_model(model.path, family, str(device), master)
    forward.model.train()
    if lora.rank:
        add_adapters(forward, lora, model.train_vision, seed)
    elif not model.train_vision:
        freeze_vision(forward)
    wrap_blocks(forward, trainer.activation_checkpointing, trainer.compile_backend)
    reference = None
    if trainer.kl_coef > 0:
        reference = load_model(model.path, family, str(device), model.dtype)
        reference.model.eval().requires_grad_(False)
    whole = sharded_reference = None
    if ranks.size > 1 or is_mixed:
        compute = MODEL_DTYPES[model.dtype] if is_mixed else None
        whole = shard_model(forward, ranks.size, device, compute=compute)
    if ranks.size > 1 and reference is not None:
        sharded_reference = shard_model(reference, ranks.size, device, frozen=True)
    features, reference_features = _build_features(forward, reference, trainer, ranks)
    return Learner(
        forward=forward,
        reference=reference,
        optimizer=build_optimizer(forward, trainer),
        family=family,
        config=trainer,
        steps=steps,
        pad_ids=renderer.pad_token_ids,
        vocab_size=renderer.vocab_size,
        device=device,
        ranks=ranks,
        whole=whole,
        sharded_reference=sharded_reference,
        features=features,
        reference_features=reference_features,
        loss=supervised_loss if supervised else load_loss(trainer.loss, trainer.loss_args),
    )


def _build_features(
    forward: Forward, reference: Forward | None, trainer: TrainerConfig, ranks: RankInfo
) -> tuple[FrozenTowerFeatures | None, FrozenTowerFeatures | None]:
    """Of the model and of the reference; a frozen tower is the reference's own."""
    cache = FeatureCache(trainer.feature_cache_mb * MEGABYTE)
    if has_frozen_tower(forward):
        kept = FrozenTowerFeatures(forward, cache, ranks.size)
        return kept, kept
    if reference is not None and has_frozen_tower(reference):
        return None, FrozenTowerFeatures(reference, cache, ranks.size)
    return None, None


def build_run_learner(
    config: RunFile | SftFile, store: MediaStore, ranks: RankInfo, supervised: bool = False
) -> Learner:
    return build_learner(
        config.model, config.trainer, store, config.run.steps, ranks, supervised, config.lora,
        config.run.seed,
    )  # fmt: skip


def build_preparer(
    media: MediaConfig, learner: Learner, store: MediaStore, sampled: bool = True
) -> BatchPreparer:
    """`sampled` is false for conversations that no sampler saw: there is no digest to ask for."""
    trainer = learner.config
    return BatchPreparer(
        family=learner.family,
        materializer=build_materializer(learner, store),
        limit=PackSize(trainer.micro_batch_tokens, trainer.micro_batch_patches),
        max_bad_fraction=media.max_bad_fraction,
        allows_unverified_pixels=media.allow_unverified_pixels or not sampled,
        aggregation=load_aggregation(trainer.loss_aggregation, trainer.loss_aggregation_args),
        on_bad_image=media.on_bad_image,
        max_sequence_tokens=trainer.max_sequence_tokens,
        stack=partial(stack_pinned, device=learner.device),
    )


def build(
    config: RunFile,
    run_dir: RunDir,
    announcements: Callable[[], BatchReady | None],
    send: Callable[[ControlMessage], None],
    ranks: RankInfo = SINGLE_RANK,
    lead: LeadChannel | None = None,
    watchdog: StallWatchdog | None = None,
) -> TrainerComponents:
    """Of rank 0, which hears the orchestrator; with `lead` it hands out what the others compute."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_run_learner(config, store, ranks)
    events = EventLog(run_dir.metrics, "trainer")
    deliver = deliver_alone if lead is None else collect_from_ranks(lead)
    watch = build_watchdog_factory(config, lead)
    saver, chosen = build_saver(config, run_dir, learner, deliver, watch())
    _check_fallback(chosen, run_dir, events)
    saver.checkpoints.clear()
    preparer = build_preparer(config.media, learner, store)
    learner.pixels = preparer.materializer.counts
    learner.watchdog = watchdog or StallWatchdog()
    learner.diagnostics_every = config.orchestrator.diagnostics_every
    distribute: Callable[[ReadyBatch], ReadyBatch] = _keep_all
    if lead is not None:
        distribute = build_distributor(lead, ranks, learner)
    feed = BatchFeed(announcements, preparer, chosen.step + 1, distribute, watch())
    publisher = _build_publisher(config, run_dir, _describe_base(config, learner))
    dtype = MODEL_DTYPES[config.model.dtype]
    async_publisher = AsyncPublisher(
        publisher, dtype, BackgroundTask("publish", feed.fail, watch())
    )
    run_writer = LeadRunWriter(
        run_dir=run_dir,
        learner=learner,
        saver=saver,
        ledger=Ledger(run_dir.ledger, chosen.step),
        events=events,
        send=send,
        source=Path(config.model.path),
        train_vision=config.model.train_vision,
        async_publisher=async_publisher,
        dtype=dtype,
        materializer=preparer.materializer,
    )
    return TrainerComponents(
        feed=feed,
        learner=learner,
        run_writer=run_writer,
        watchdog=learner.watchdog,
        first_step=chosen.step,
    )


def build_watchdog_factory(
    config: RunFile | SftFile, channel: LeadChannel | FollowerChannel | None
) -> Callable[[], StallWatchdog]:
    """Makes what watches a thread that works beside the loop."""
    tell = channel.fail if channel is not None else lambda problem: None
    return lambda: StallWatchdog(config.trainer.stall_timeout_s, tell)


def build_distributor(lead: LeadChannel, ranks: RankInfo, learner: Learner) -> BatchDistributor:
    price = estimate_price(learner.forward, learner.config.micro_batch_cost_model)
    return BatchDistributor(lead, ranks.size, price, learner.config.pixel_cache_mb * MEGABYTE)


def build_materializer(learner: Learner, store: MediaStore) -> Materializer:
    """Pixels are made ahead of the step, by as many threads as the process may compute with."""
    max_bytes = learner.config.pixel_cache_mb * MEGABYTE
    return Materializer(learner.family, store, max_bytes, threads=torch.get_num_threads())


def _build_publisher(config: RunFile, run_dir: RunDir, stand: Adapter | None) -> Publisher:
    if config.trainer.publish == "files":
        return FilePublisher(run_dir.weights, stand)
    return BroadcastPublisher(run_dir.weights, Broadcaster(config.trainer.address), stand)


def _describe_base(config: RunFile, learner: Learner) -> Adapter | None:
    """What published adapters stand on; every rank looks at it once, before the first step."""
    if config.lora.publish == "merged":
        return None
    return describe_adapter_base(learner.forward.model, MODEL_DTYPES[config.model.dtype])


def build_saver(
    config: RunFile | SftFile,
    run_dir: RunDir,
    learner: Learner,
    deliver: Callable[[int, WeightFile], list[WeightFile] | None],
    watchdog: StallWatchdog,
) -> tuple[CheckpointSaver, ResumePoint]:
    """What writes checkpoints from now on, with the newest whole one put back."""
    settings, ranks = config.trainer, learner.ranks
    checkpoints = CheckpointStore(
        run_dir.checkpoints, settings.keep_checkpoints, settings.keep_checkpoints_every
    )
    chosen = checkpoints.choose(
        lambda found: all_gather_list(found, ranks.size), ranks.rank, ranks.size
    )
    shards = chosen.shards()
    if shards is not None and chosen.path is not None:
        restore(shards, learner.forward.model, learner.optimizer, ranks, chosen.path)
    every = settings.checkpoint_every
    train_vision = config.model.train_vision
    background_task = BackgroundTask("checkpoint", watchdog=watchdog, min_limit_s=LONG_LIMIT_S)
    return CheckpointSaver(
        checkpoints, ranks, every, chosen.step, train_vision, deliver, background_task
    ), chosen


def _check_fallback(chosen: ResumePoint, run_dir: RunDir, events: EventLog) -> None:
    """Says which checkpoints were refused; going back needs the batches since."""
    for problem in chosen.refused:
        print(f"refused: {problem}", file=sys.stderr, flush=True)
        events.write("checkpoint_refused", chosen.step, problem=problem)
    trained = len(read_ledger(run_dir.ledger))
    if chosen.refused and trained > chosen.step and not run_dir.batch(chosen.step + 1).is_file():
        raise ResumeRefused(
            f"{chosen.refused[0]}, and the batches after step {chosen.step} are gone",
            "restore the checkpoint from a copy, or start a new run",
        )


def _keep_all(ready: ReadyBatch) -> ReadyBatch:
    return ready


def build_follower(
    config: RunFile,
    run_dir: RunDir,
    ranks: RankInfo,
    follow: FollowerChannel,
    watchdog: StallWatchdog,
) -> TrainerComponents:
    """Of a rank other than 0."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_run_learner(config, store, ranks)
    watch = build_watchdog_factory(config, follow)
    saver, chosen = build_saver(config, run_dir, learner, deliver_to_lead(follow), watch())
    as_adapters = _describe_base(config, learner) is not None
    learner.watchdog = watchdog
    learner.diagnostics_every = config.orchestrator.diagnostics_every
    family, materializer = learner.family, build_materializer(learner, store)
    learner.pixels = materializer.counts
    return TrainerComponents(
        feed=ShareFeed(
            follow,
            materializer,
            len(family.positions(1, ())[0]),
            chosen.step + 1,
            partial(stack_pinned, device=learner.device),
            watch(),
        ),
        learner=learner,
        run_writer=FollowerRunWriter(learner, saver, as_adapters),
        watchdog=learner.watchdog,
        first_step=chosen.step,
    )
