"""Constructs the trainer's parts from a run file, of `rl` or `sft`, on any rank. No flow here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from sightline.algo.losses import load_loss
from sightline.algo.losses import supervised as supervised_loss
from sightline.algo.registry import load_aggregation
from sightline.compute.broadcast import Broadcaster
from sightline.compute.feature_cache import FeatureCache
from sightline.compute.model import MODEL_DTYPES, load_model, pick_device
from sightline.compute.transfer import stack_pinned
from sightline.config import LoraConfig, MediaConfig, ModelConfig, RunFile, SftFile, TrainerConfig
from sightline.errors import ResumeRefused
from sightline.families import Forward, load_family, load_renderer
from sightline.media import MediaStore
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.run import EventLog, RunDir
from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.blocks import wrap_blocks
from sightline.trainer.checkpoint import CheckpointStore, ResumePoint
from sightline.trainer.checkpoint_saver import CheckpointSaver
from sightline.trainer.distribute import BatchDistributor, ShareReader
from sightline.trainer.features import FrozenTowerFeatures, has_frozen_tower
from sightline.trainer.feed import AnnouncedBatches, BatchPrefetcher, BatchPreparer, ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.ledger import Ledger, read_ledger
from sightline.trainer.loop import TrainerComponents
from sightline.trainer.lora import NO_ADAPTERS, add_adapters, describe_adapter_base
from sightline.trainer.optimizer import build_optimizer, freeze_vision
from sightline.trainer.price import estimate_price
from sightline.trainer.publish import AsyncPublisher, BroadcastPublisher, FilePublisher, Publisher
from sightline.trainer.ranks import SINGLE_RANK, FollowerChannel, LeadChannel, RankInfo
from sightline.trainer.run_writer import RunWriter
from sightline.trainer.sft import ConversationBatches, open_source
from sightline.trainer.shard import all_gather_list, join_process_group, shard_model
from sightline.trainer.snapshot import restore
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog
from sightline.wire.control import BatchReady, ControlMessage
from sightline.wire.weights import Adapter

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
    sharded = sharded_reference = None
    if ranks.size > 1 or is_mixed:
        compute = MODEL_DTYPES[model.dtype] if is_mixed else None
        sharded = shard_model(forward, ranks.size, device, compute=compute)
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
        sharded=sharded,
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


def build_preparer(
    media: MediaConfig, learner: Learner, materializer: Materializer, sampled: bool = True
) -> BatchPreparer:
    """`sampled` is false for conversations that no sampler saw: there is no digest to ask for."""
    trainer = learner.config
    return BatchPreparer(
        family=learner.family,
        materializer=materializer,
        limit=PackSize(trainer.micro_batch_tokens, trainer.micro_batch_patches),
        bad_media=BadMediaPolicy(
            media.on_bad_image,
            media.max_bad_fraction,
            media.allow_unverified_pixels or not sampled,
        ),
        aggregation=load_aggregation(trainer.loss_aggregation, trainer.loss_aggregation_args),
        max_sequence_tokens=trainer.max_sequence_tokens,
        stack=partial(stack_pinned, device=learner.device),
    )


def build_materializer(learner: Learner, store: MediaStore) -> Materializer:
    """Pixels are made ahead of the step, by as many threads as the process may compute with."""
    max_bytes = learner.config.pixel_cache_mb * MEGABYTE
    return Materializer(learner.family, store, max_bytes, threads=torch.get_num_threads())


def build_conversations(
    config: SftFile, learner: Learner, materializer: Materializer, done: int = 0
) -> ConversationBatches:
    """The batches of supervised training, from the step after `done`."""
    store, model = materializer.store, config.model
    return ConversationBatches(
        open_source(config, store),
        load_renderer(model.path, store, learner.family, number_images=model.number_images),
        build_preparer(config.media, learner, materializer, sampled=False),
        config,
        done,
    )


class Orchestrator(NamedTuple):
    """The orchestrator, as rank 0 of `rl` sees it."""

    announcements: Callable[[], BatchReady | None]
    """Waits for the next batch to be announced; None where there are no more."""
    send: Callable[[ControlMessage], None]


def build(
    config: RunFile | SftFile,
    run_dir: RunDir,
    orchestrator: Orchestrator | None = None,
    ranks: RankInfo = SINGLE_RANK,
    channel: LeadChannel | FollowerChannel | None = None,
    watchdog: StallWatchdog | None = None,
) -> TrainerComponents:
    """The parts of one rank, with the newest checkpoint of the run restored.

    Every rank calls it, since loading and restoring are collectives. `orchestrator` is given to
    rank 0 of `rl`; `channel` joins the ranks, where there are several.
    """
    supervised = isinstance(config, SftFile)
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_learner(
        config.model, config.trainer, store, config.run.steps, ranks, supervised, config.lora,
        config.run.seed,
    )  # fmt: skip
    materializer = build_materializer(learner, store)
    learner.pixels, learner.watchdog = materializer.counts, watchdog or StallWatchdog()
    checkpoints = CheckpointStore(
        run_dir.checkpoints, config.trainer.keep_checkpoints, config.trainer.keep_checkpoints_every
    )
    resume = restore_newest(checkpoints, learner)
    events = EventLog(run_dir.metrics, "trainer") if ranks.is_lead else None
    if events is not None:
        _report_refused(resume, events)
        checkpoints.clear()
    watch = partial(_build_watchdog, config.trainer.stall_timeout_s, channel)
    batches: Iterable[ReadyBatch]
    if isinstance(channel, FollowerChannel):
        stack = partial(stack_pinned, device=learner.device)
        axes = learner.family.num_axes
        batches = ShareReader(channel, materializer, axes, stack, watch())
    elif isinstance(config, SftFile):
        batches = build_conversations(config, learner, materializer, resume.step)
        batches.watchdog = watch()
    else:
        assert orchestrator is not None
        _check_batches(resume, run_dir)
        preparer = build_preparer(config.media, learner, materializer)
        announcements = orchestrator.announcements
        batches = AnnouncedBatches(announcements, preparer, resume.step + 1, watch())
    if isinstance(channel, LeadChannel):
        price = estimate_price(learner.forward, config.trainer.micro_batch_cost_model)
        batches = BatchDistributor(channel, ranks.size, price).iterate_shares(batches)
    feed = BatchPrefetcher(batches)
    writer = RunWriter(
        run_dir=run_dir,
        learner=learner,
        saver=_build_saver(checkpoints, learner, config, resume.step, channel, watch()),
        source=Path(config.model.path),
        export_dir=run_dir.checkpoints / "final",
        dtype=MODEL_DTYPES[config.model.dtype],
        events=events,
    )
    if isinstance(config, SftFile):
        writer.export_dir = Path(config.sft.output_dir)
    else:
        learner.diagnostics_every = config.orchestrator.diagnostics_every
        writer.publishes, writer.adapter = True, _describe_base(config, learner)
    if isinstance(config, RunFile) and orchestrator is not None:
        publisher = _build_publisher(config, run_dir, writer.adapter)
        task = BackgroundTask("publish", feed.fail, watch())
        writer.async_publisher = AsyncPublisher(publisher, writer.dtype, task)
        writer.ledger, writer.send = Ledger(run_dir.ledger, resume.step), orchestrator.send
    return TrainerComponents(feed, learner, writer, learner.watchdog, resume.step)


def restore_newest(checkpoints: CheckpointStore, learner: Learner) -> ResumePoint:
    """Restores model, optimizer and random state from the newest intact checkpoint, if any.

    Every rank calls it, checks its share of the files, and comes to the same checkpoint.
    """
    ranks = learner.ranks
    resume = checkpoints.choose(
        lambda found: all_gather_list(found, ranks.size), ranks.rank, ranks.size
    )
    if (shards := resume.shards()) is not None and resume.path is not None:
        restore(shards, learner.forward.model, learner.optimizer, ranks, resume.path)
    return resume


def _build_saver(
    checkpoints: CheckpointStore,
    learner: Learner,
    config: RunFile | SftFile,
    step: int,
    channel: LeadChannel | FollowerChannel | None,
    watchdog: StallWatchdog,
) -> CheckpointSaver:
    task = BackgroundTask("checkpoint", watchdog=watchdog, min_limit_s=LONG_LIMIT_S)
    every, train_vision = config.trainer.checkpoint_every, config.model.train_vision
    saver = CheckpointSaver(
        checkpoints, learner.ranks, every, step, train_vision, background_task=task
    )
    if channel is not None:
        saver.collect_files = channel.collect_files
    return saver


def _build_watchdog(limit_s: float, channel: LeadChannel | FollowerChannel | None) -> StallWatchdog:
    """Watches a thread that works beside the loop."""
    return StallWatchdog(limit_s) if channel is None else StallWatchdog(limit_s, channel.fail)


def _report_refused(resume: ResumePoint, events: EventLog) -> None:
    """Says which checkpoints were refused."""
    for problem in resume.refused:
        print(f"refused: {problem}", file=sys.stderr, flush=True)
        events.write("checkpoint_refused", resume.step, problem=problem)


def _check_batches(resume: ResumePoint, run_dir: RunDir) -> None:
    """Going back further than the newest checkpoint needs the batches since."""
    trained = len(read_ledger(run_dir.ledger))
    if resume.refused and trained > resume.step and not run_dir.batch(resume.step + 1).is_file():
        raise ResumeRefused(
            f"{resume.refused[0]}, and the batches after step {resume.step} are gone",
            "restore the checkpoint from a copy, or start a new run",
        )


def _describe_base(config: RunFile, learner: Learner) -> Adapter | None:
    """The base of adapters that leave unmerged; every rank has to call it, before the first step."""
    if config.lora.publish == "merged":
        return None
    return describe_adapter_base(learner.forward.model, MODEL_DTYPES[config.model.dtype])


def _build_publisher(config: RunFile, run_dir: RunDir, adapter: Adapter | None) -> Publisher:
    if config.trainer.publish == "files":
        return FilePublisher(run_dir.weights, adapter)
    return BroadcastPublisher(run_dir.weights, Broadcaster(config.trainer.address), adapter)
