"""Constructs the trainer from a run file of `rl` or `sft`, on any rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import torch

from sightline.algo.algorithm import Algorithm
from sightline.algo.algorithms import load_algorithm, load_sft_algorithm
from sightline.algo.registry import load_aggregation
from sightline.compute.feature_cache import FeatureCache
from sightline.compute.model import (
    MODEL_DTYPES,
    check_weights,
    limit_gpu_memory,
    load_model,
    pick_device,
)
from sightline.config import (
    AlgorithmConfig,
    LoraConfig,
    MediaConfig,
    ModelConfig,
    RunFile,
    SftFile,
    TrainerConfig,
)
from sightline.errors import ConfigError, ResumeRefused
from sightline.families import Family, Forward, check_parallel, load_family, load_renderer
from sightline.families.checkpoint_files import resolve_checkpoint
from sightline.families.device_copy import allocate_rows
from sightline.media import MediaStore, open_store
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.pixels.pixels import SharedPatches
from sightline.render import Renderer, check_vocabularies
from sightline.run import EventLog, RunDir
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.blocks import wrap_blocks
from sightline.trainer.checkpoint import (
    CheckpointSaver,
    CheckpointStore,
    Ledger,
    ResumePoint,
    check_base,
    open_shards,
    read_ledger,
)
from sightline.trainer.distribute import estimate_price, iterate_shares, read_shares
from sightline.trainer.feed import BatchPrefetcher, BatchPreparer, ReadyBatch, read_announced
from sightline.trainer.forward_pass import FrozenModel, FrozenTowerFeatures
from sightline.trainer.learner import Learner
from sightline.trainer.loop import TrainerComponents
from sightline.trainer.lora import NO_ADAPTERS, add_value_head, describe_adapter, digest_frozen
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.optimizer import build_optimizer
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.policy import choose_transport, load_policy, sends_adapters
from sightline.trainer.ranks import (
    NO_CHANNEL,
    SINGLE_RANK,
    FollowerChannel,
    LeadChannel,
    RankChannel,
    RankInfo,
)
from sightline.trainer.run_writer import AsyncPublisher, RunWriter
from sightline.trainer.sft import ConversationBatches, open_source
from sightline.trainer.shard import identify_machine, shard_model
from sightline.trainer.snapshot import load_shards, restore
from sightline.trainer.watchdog import LONG_LIMIT_S, BackgroundTask, StallWatchdog
from sightline.wire.control import BatchReady, ControlMessage
from sightline.wire.weights import Manifest, check_history

MEGABYTE = 1 << 20


def pick_rank_device(name: str, ranks: RankInfo) -> torch.device:
    """Return a rank's device. The ranks of one machine use its GPUs in turn."""
    device = torch.device(pick_device(name))
    if device.type == "cuda":
        if str(device) == "cuda":
            device = torch.device("cuda", ranks.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def build_learner(
    model: ModelConfig,
    trainer: TrainerConfig,
    store: MediaStore,
    steps: int,
    ranks: RankInfo = SINGLE_RANK,
    algorithm: Algorithm | None = None,
    lora: LoraConfig = NO_ADAPTERS,
    seed: int = 0,
) -> Learner:
    """Load the model and everything that the algorithm needs."""
    algorithm = algorithm or load_algorithm(AlgorithmConfig())
    device = pick_rank_device(trainer.device, ranks)
    dims = ParallelDims.of(ranks, trainer)
    if device.type == "cpu" and model.exact and dims.size > 1:
        raise ConfigError(
            f"[model] exact = true with {dims.size} ranks on CPUs: exact CPU runs encode one image "
            "at a time, and ranks have different numbers of images",
            "set [trainer] ranks = 1, or train on GPUs",
        )
    family = load_family(model.path, model.exact, **model.overrides())
    check_parallel(family, model.path, trainer, model.exact)
    loads_teacher = algorithm.needs.teacher_logprobs and not algorithm.settings.teacher_server
    teacher_path = loads_teacher and algorithm.settings.teacher or model.path
    if dims.is_distributed:
        if ranks.is_lead:  # the other ranks wait for it in `join`
            for path in dict.fromkeys((model.path, teacher_path)):
                check_weights(path, family, str(device), model.dtype)
        dims.join(ranks, device)
    renderer = load_renderer(model.path, store, family)
    # With several ranks, no rank holds the whole model: each reads its shards.
    place = "meta" if dims.is_distributed else str(device)
    exact = (str(device), model.dtype) if model.exact else None
    forward = load_policy(model, lora, seed, family, place, exact)
    forward.model.eval()  # without dropout and router noise: logprobs must not be random
    value_head = add_value_head(forward, algorithm, device, seed)
    wrap_blocks(forward, trainer.activation_checkpointing, trainer.compile_backend, model.exact)
    sharded = None
    if dims.is_distributed:
        sharded = shard_model(forward, dims, plan=family.tensor_plan)
        load_shards(sharded, resolve_checkpoint(model.path, True), device)

    def load_frozen(path: str, features: FrozenTowerFeatures | None) -> FrozenModel:
        frozen = load_model(path, family, place, model.dtype)
        frozen.model.eval().requires_grad_(False)
        shards = None
        if dims.is_distributed:
            shards = shard_model(frozen, dims, frozen=True, plan=family.tensor_plan)
            load_shards(shards, resolve_checkpoint(path, True), device)
        return FrozenModel(frozen, shards, features or _build_features(frozen, trainer, dims))

    features = _build_features(forward, trainer, dims)
    reference = teacher = None
    if algorithm.needs.reference:
        reference = load_frozen(model.path, features)
    if loads_teacher:
        _check_teacher(teacher_path, model, family, renderer, store)
        teacher = load_frozen(teacher_path, None)
    return Learner(
        forward=forward,
        algorithm=algorithm,
        reference=reference,
        teacher=teacher,
        value_head=value_head,
        seed=seed,
        optimizer=build_optimizer(forward, trainer),
        family=family,
        config=trainer,
        steps=steps,
        pad_ids=renderer.pad_token_ids,
        vocab_size=renderer.vocab_size,
        device=device,
        dims=dims,
        sharded=sharded,
        features=features,
        exact=model.exact,
        replays_routes=model.router_replay,
    )


def _build_features(
    forward: Forward, trainer: TrainerConfig, dims: ParallelDims
) -> FrozenTowerFeatures | None:
    """Return a cache of the tower's features; None without a tower, or if it trains."""
    parameters = [parameter for _, parameter in forward.vision_parameters()]
    if not parameters or any(parameter.requires_grad for parameter in parameters):
        return None
    cache = FeatureCache(trainer.feature_cache_mb * MEGABYTE)
    return FrozenTowerFeatures(forward, cache, dims)


def _check_teacher(
    path: str, model: ModelConfig, family: Family, renderer: Renderer, store: MediaStore
) -> None:
    """Raise if the teacher uses different pixels or tokens than the policy."""
    other, name = load_family(path, **model.overrides()), f"[algorithm] teacher = {path!r}"
    if other.fingerprint != family.fingerprint:
        raise ConfigError(
            f"{name} does not take the policy's pixels: it is {other.name}, with the fingerprint "
            f"{other.fingerprint}, and the policy is {family.name}, with {family.fingerprint}",
            "use a teacher of the same family, with the same processor settings",
        )
    check_vocabularies(renderer, load_renderer(path, store, other), name)


def build_preparer(
    media: MediaConfig, learner: Learner, pixels: MicroBatchPixels, sampled: bool = True
) -> BatchPreparer:
    """Build the preparer. `sampled` is False for conversations, which have no pixel digests."""
    trainer, settings = learner.config, learner.algorithm.settings
    return BatchPreparer(
        pixels=pixels,
        limit=PackSize(trainer.max_micro_batch_tokens, trainer.micro_batch_patches),
        bad_media=BadMediaPolicy(media.max_bad_fraction, not sampled),
        aggregation=load_aggregation(settings.aggregation, settings.aggregation_args),
        algorithm=learner.algorithm,
        num_minibatches=settings.minibatches,
        seed=learner.seed,
        max_sequence_tokens=trainer.max_sequence_tokens,
    )


def build_pixels(learner: Learner, store: MediaStore) -> MicroBatchPixels:
    """Build the object that makes this rank's pixels, within its share of `pixel_cache_mb`.

    The ranks of a machine share half of it as a cache. They divide the other half for their
    micro-batches and images in progress. Every rank calls it.
    """
    machines = learner.dims.gather_list([f"{identify_machine()} {os.getpid()}"])
    machine = machines[learner.dims.rank].split()[0]
    here = [int(name.split()[1]) for name in machines if name.split()[0] == machine]
    half = learner.config.pixel_cache_mb * MEGABYTE // 2
    shared = SharedPatches(half, owner=here[0]) if len(here) > 1 and half else None
    materializer = Materializer(
        learner.family,
        store,
        half if shared is None else 0,
        threads=torch.get_num_threads(),
        shared=shared,
    )
    return MicroBatchPixels(
        materializer,
        half // len(here) * 7 // 8,  # an eighth is for the images that rank 0 verifies
        allocate=partial(allocate_rows, device=learner.device),
        is_pinned=learner.device.type == "cuda",
        keep=machines[0].split()[0] != machine,  # on rank 0's machine, rank 0 has cached them
    )


def build_conversations(
    config: SftFile, learner: Learner, pixels: MicroBatchPixels, **options: Any
) -> ConversationBatches:
    """Build the batches of supervised training. `options` are fields of `ConversationBatches`."""
    store = pixels.materializer.store
    renderer = load_renderer(config.model.path, store, learner.family)
    preparer = build_preparer(config.media, learner, pixels, sampled=False)
    return ConversationBatches(open_source(config, store), renderer, preparer, config, **options)


class Orchestrator(NamedTuple):
    """Rank 0's connection to the orchestrator in `rl`."""

    announcements: Callable[[], BatchReady | None]
    """Waits for the next batch. Returns None after the last."""
    send: Callable[[ControlMessage], None]
    send_checkpoints: Callable[[], None] = lambda: None
    """Sends new checkpoints to a run directory on another machine."""


def build(
    config: RunFile | SftFile,
    run_dir: RunDir,
    orchestrator: Orchestrator | None = None,
    ranks: RankInfo = SINGLE_RANK,
    channel: RankChannel = NO_CHANNEL,
    watchdog: StallWatchdog | None = None,
    stop: Event | None = None,
) -> TrainerComponents:
    """Build the parts of one rank, and restore the run's newest checkpoint.

    Every rank calls it, because loading and restoring are collectives. Rank 0 of `rl` passes
    `orchestrator`. `channel` connects several ranks. `stop` ends a supervised run before its next
    step.
    """
    store = open_store(config.media.root or run_dir.media, **config.media.store_options())
    trainer = config.trainer
    if isinstance(config, RunFile):
        # Leave the servers on this rank's GPU their share of its memory.
        if share := config.get_trainer_memory_share(ranks.rank):
            device = str(pick_rank_device(trainer.device, ranks))
            if limit := limit_gpu_memory(device, share):
                print(f"memory of {device}: {limit / 1e9:.1f} GB for this rank", file=sys.stderr)
        algorithm = load_algorithm(config.algorithm)
    else:
        algorithm = load_sft_algorithm(config.algorithm)
    learner = build_learner(
        config.model, trainer, store, config.run.steps, ranks, algorithm, config.lora,
        config.run.seed,
    )  # fmt: skip
    learner.watchdog = watchdog or StallWatchdog()
    checkpoints = CheckpointStore(
        run_dir.checkpoints, trainer.keep_checkpoints, trainer.keep_checkpoints_every
    )
    resume = checkpoints.choose(learner.dims)  # the same on every rank
    if resume.path is not None:
        shards = open_shards(resume.path)
        restore(shards, learner.forward.model, learner.optimizer, learner.dims, resume.path)
        learner.replayed = find_replayed_steps(learner.device, run_dir, resume.step)
    base = digest_frozen(learner.forward.model, MODEL_DTYPES[config.model.dtype])
    if resume.path is not None:
        check_base(resume.path, base, config.model.path)
    events = None
    if ranks.is_lead:
        events = EventLog(run_dir.metrics, "trainer")
        for problem in resume.refused:
            print(f"refused: {problem}", file=sys.stderr, flush=True)
            events.write("checkpoint_refused", resume.step, problem=problem)
        checkpoints.clear()
    watch = partial(StallWatchdog, trainer.stall_timeout_s, channel.fail)
    feed = BatchPrefetcher(
        _build_batches(
            config, run_dir, orchestrator, learner, store, channel, resume, watch(), stop
        )
    )
    saver = CheckpointSaver(
        checkpoints,
        learner.dims,
        trainer.checkpoint_every,
        resume.step,
        config.model.train_vision,
        base,
        channel.collect_files,
        BackgroundTask("checkpoint", watchdog=watch(), min_limit_s=LONG_LIMIT_S),
        orchestrator.send_checkpoints if orchestrator is not None else lambda: None,
    )
    writer = RunWriter(config, run_dir, learner, saver, events)
    if isinstance(config, RunFile):
        task = BackgroundTask("publish", feed.fail, watch())
        _add_publishing(writer, config, orchestrator, task, resume.step)
    return TrainerComponents(feed, learner, writer, resume.step)


def find_replayed_steps(device: torch.device, run_dir: RunDir, step: int) -> range:
    """Return the steps whose batches versions sampled that a resume from `step` computes again.

    On a CPU, those versions have the same bits.
    """
    stop = step + 2
    while device.type != "cpu" and run_dir.batch(stop).is_file():
        stop += 1
    return range(step + 2, stop)


def _build_batches(
    config: RunFile | SftFile,
    run_dir: RunDir,
    orchestrator: Orchestrator | None,
    learner: Learner,
    store: MediaStore,
    channel: RankChannel,
    resume: ResumePoint,
    watchdog: StallWatchdog,
    stop: Event | None,
) -> Iterable[ReadyBatch]:
    """Build this rank's batches, from the step after the checkpoint."""
    pixels = build_pixels(learner, store)
    learner.pixels = pixels.materializer.counts
    if isinstance(channel, FollowerChannel):
        return read_shares(channel, pixels, learner.family.num_axes, learner.dims.context)
    batches: Iterable[ReadyBatch]
    if isinstance(config, SftFile):
        batches = build_conversations(
            config, learner, pixels,
            done=resume.step, watchdog=watchdog, stop=stop or Event(), run_dir=run_dir,
        )  # fmt: skip
    else:
        assert orchestrator is not None
        trained, first = len(read_ledger(run_dir.ledger)), resume.step + 1
        if resume.refused and trained >= first and not run_dir.batch(first).is_file():
            raise ResumeRefused(
                f"{resume.refused[0]}, and the batches after step {resume.step} are missing",
                "restore the checkpoint from a backup, or start a new run",
            )
        preparer = build_preparer(config.media, learner, pixels)
        batches = read_announced(orchestrator.announcements, preparer, first, watchdog)
    if isinstance(channel, LeadChannel):
        batches = iterate_shares(batches, channel, learner.dims, estimate_price(learner.forward))
    return batches


def _add_publishing(
    writer: RunWriter,
    config: RunFile,
    orchestrator: Orchestrator | None,
    task: BackgroundTask,
    step: int,
) -> None:
    """Publish every version, as `rl` needs. Every rank calls it before the first step."""
    writer.learner.diagnostics_every = config.orchestrator.diagnostics_every
    transport, model = choose_transport(config), writer.learner.forward.model
    if sends_adapters(config, transport, model):
        writer.adapter = describe_adapter(model, writer.dtype, writer.saver.base)
    elif config.lora.wants_adapters:
        print("publishing merged weights, see docs/lora.md", file=sys.stderr, flush=True)
    if orchestrator is None:
        return
    run_dir = writer.run_dir
    check_history(run_dir.weights, step)
    publisher = transport.open_publisher(config, run_dir)
    run_id = run_dir.read_id()
    draft = Manifest(0, 0, [], transport=transport.name, adapter=writer.adapter, run=run_id)
    writer.async_publisher = AsyncPublisher(publisher, task, draft)
    writer.ledger, writer.send = Ledger(run_dir.ledger, step), orchestrator.send
