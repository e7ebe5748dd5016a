"""Constructs the trainer's parts from a run file. No flow here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sightline.compute.broadcast import Broadcaster
from sightline.compute.feature_cache import FeatureCache
from sightline.compute.model import DTYPES, load_model, pick_device
from sightline.compute.transfer import stack
from sightline.config import Lora, Media, Model, RunFile, SftFile, Trainer
from sightline.errors import ResumeRefused
from sightline.families import Forward, load_family, load_renderer
from sightline.media import MediaStore
from sightline.monitor import EventLog, RunDir
from sightline.pack import Average, Cost
from sightline.pixels import Materializer
from sightline.trainer.aside import Aside
from sightline.trainer.blocks import wrap_blocks
from sightline.trainer.checkpoint import Checkpoints, Chosen
from sightline.trainer.features import Features, is_frozen
from sightline.trainer.feed import Feed, Preparer, ReadyBatch
from sightline.trainer.keeper import Follower, Keeper
from sightline.trainer.learner import Learner
from sightline.trainer.ledger import Ledger, read_ledger
from sightline.trainer.loop import Parts
from sightline.trainer.lora import NO_ADAPTERS, add_adapters, stand_of
from sightline.trainer.optimizer import build_optimizer, freeze_vision
from sightline.trainer.price import price_of
from sightline.trainer.publish import Files, Outbox, Publisher, Sent
from sightline.trainer.pulse import LONG_S, Pulse
from sightline.trainer.ranks import ALONE, Follow, Lead, Ranks
from sightline.trainer.saver import Saver, alone, from_all, to_lead
from sightline.trainer.shard import agree, join, shard
from sightline.trainer.snapshot import restore
from sightline.trainer.spread import ShareFeed, Spread
from sightline.wire.control import Announce, Control
from sightline.wire.weights import Adapter, WeightFile

MEGABYTE = 1 << 20


def device_of(name: str, ranks: Ranks) -> torch.device:
    """Where a rank computes; ranks of one machine take its GPUs in turn."""
    device = torch.device(pick_device(name))
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", ranks.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def build_learner(
    model: Model,
    trainer: Trainer,
    store: MediaStore,
    steps: int,
    ranks: Ranks = ALONE,
    imitates: bool = False,
    lora: Lora = NO_ADAPTERS,
    seed: int = 0,
) -> Learner:
    device = device_of(trainer.device, ranks)
    master = model.dtype if trainer.master_dtype == "model" else "float32"
    is_mixed = master != model.dtype
    if ranks.size > 1 or is_mixed:
        join(ranks, device)
    family = load_family(model.path, **model.overrides())
    renderer = load_renderer(model.path, store, family)
    forward = load_model(model.path, family, str(device), master)
    forward.model.train()
    if lora.rank:
        add_adapters(forward, lora, model.train_vision, seed)
    elif not model.train_vision:
        freeze_vision(forward)
    wrap_blocks(forward, trainer.activation_checkpointing, trainer.compile)
    reference = None
    if trainer.kl_weight > 0:
        reference = load_model(model.path, family, str(device), model.dtype)
        reference.model.eval().requires_grad_(False)
    whole = reference_whole = None
    if ranks.size > 1 or is_mixed:
        compute = DTYPES[model.dtype] if is_mixed else None
        whole = shard(forward, ranks.size, device, compute=compute)
    if ranks.size > 1 and reference is not None:
        reference_whole = shard(reference, ranks.size, device, frozen=True)
    features, reference_features = _kept(forward, reference, trainer, ranks)
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
        reference_whole=reference_whole,
        features=features,
        reference_features=reference_features,
        imitates=imitates,
    )


def _kept(
    forward: Forward, reference: Forward | None, trainer: Trainer, ranks: Ranks
) -> tuple[Features | None, Features | None]:
    """Of the model and of the reference; a frozen tower is the reference's own."""
    cache = FeatureCache(trainer.feature_cache_mb * MEGABYTE)
    if is_frozen(forward):
        kept = Features(forward, cache, ranks.size)
        return kept, kept
    if reference is not None and is_frozen(reference):
        return None, Features(reference, cache, ranks.size)
    return None, None


def learner_of(
    config: RunFile | SftFile, store: MediaStore, ranks: Ranks, imitates: bool = False
) -> Learner:
    return build_learner(
        config.model, config.trainer, store, config.run.steps, ranks, imitates, config.lora,
        config.run.seed,
    )  # fmt: skip


def build_preparer(
    media: Media, learner: Learner, store: MediaStore, sampled: bool = True
) -> Preparer:
    """`sampled` is false for conversations that no sampler saw: there is no digest to ask for."""
    trainer = learner.config
    return Preparer(
        family=learner.family,
        materializer=build_materializer(learner, store),
        limit=Cost(trainer.micro_batch_tokens, trainer.micro_batch_patches),
        max_bad_fraction=media.max_bad_fraction,
        allows_unproven=media.allow_unproven or not sampled,
        average=Average(trainer.loss_average, trainer.loss_constant),
        on_bad=media.on_bad,
        max_sequence=trainer.max_sequence,
        stack=partial(stack, device=learner.device),
    )


def build(
    config: RunFile,
    run_dir: RunDir,
    announcements: Callable[[], Announce | None],
    send: Callable[[Control], None],
    ranks: Ranks = ALONE,
    lead: Lead | None = None,
    pulse: Pulse | None = None,
) -> Parts:
    """Of rank 0, which hears the orchestrator; with `lead` it hands out what the others compute."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = learner_of(config, store, ranks)
    events = EventLog(run_dir.metrics, "trainer")
    deliver = alone if lead is None else from_all(lead)
    watch = watch_of(config, lead)
    saver, chosen = build_saver(config, run_dir, learner, deliver, watch())
    _check_fallback(chosen, run_dir, events)
    saver.checkpoints.clear()
    preparer = build_preparer(config.media, learner, store)
    learner.pixels = preparer.materializer.counts
    learner.pulse = pulse or Pulse()
    learner.probe_every = config.orchestrator.probe_every
    hand_out: Callable[[ReadyBatch], ReadyBatch] = _keep_all
    if lead is not None:
        hand_out = build_spread(lead, ranks, learner)
    feed = Feed(announcements, preparer, chosen.step + 1, hand_out, watch())
    publisher = _publisher(config, run_dir, _stand(config, learner))
    dtype = DTYPES[config.model.dtype]
    outbox = Outbox(publisher, dtype, Aside("publish", feed.fail, watch()))
    keeper = Keeper(
        run_dir=run_dir,
        learner=learner,
        saver=saver,
        ledger=Ledger(run_dir.ledger, chosen.step),
        events=events,
        send=send,
        source=Path(config.model.path),
        train_vision=config.model.train_vision,
        outbox=outbox,
        dtype=dtype,
        materializer=preparer.materializer,
    )
    return Parts(
        feed=feed,
        learner=learner,
        keeper=keeper,
        pulse=learner.pulse,
        first_step=chosen.step,
    )


def watch_of(config: RunFile | SftFile, channel: Lead | Follow | None) -> Callable[[], Pulse]:
    """Makes what watches a thread that works beside the loop."""
    tell = channel.fail if channel is not None else lambda problem: None
    return lambda: Pulse(config.trainer.stuck_after_s, tell)


def build_spread(lead: Lead, ranks: Ranks, learner: Learner) -> Spread:
    price = price_of(learner.forward, learner.config.micro_batch_price)
    return Spread(lead, ranks.size, price, learner.config.pixel_cache_mb * MEGABYTE)


def build_materializer(learner: Learner, store: MediaStore) -> Materializer:
    """Pixels are made ahead of the step, by as many threads as the process may compute with."""
    max_bytes = learner.config.pixel_cache_mb * MEGABYTE
    return Materializer(learner.family, store, max_bytes, threads=torch.get_num_threads())


def _publisher(config: RunFile, run_dir: RunDir, stand: Adapter | None) -> Publisher:
    if config.trainer.publish == "files":
        return Files(run_dir.weights, stand)
    return Sent(run_dir.weights, Broadcaster(config.trainer.address), stand)


def _stand(config: RunFile, learner: Learner) -> Adapter | None:
    """What published adapters stand on; every rank looks at it once, before the first step."""
    if config.lora.publish == "merged":
        return None
    return stand_of(learner.forward.model, DTYPES[config.model.dtype])


def build_saver(
    config: RunFile | SftFile,
    run_dir: RunDir,
    learner: Learner,
    deliver: Callable[[int, WeightFile], list[WeightFile] | None],
    pulse: Pulse,
) -> tuple[Saver, Chosen]:
    """What writes checkpoints from now on, with the newest whole one put back."""
    settings, ranks = config.trainer, learner.ranks
    checkpoints = Checkpoints(run_dir.checkpoints, settings.keep_checkpoints, settings.keep_every)
    chosen = checkpoints.choose(lambda found: agree(found, ranks.size), ranks.rank, ranks.size)
    shards = chosen.shards()
    if shards is not None and chosen.path is not None:
        restore(shards, learner.forward.model, learner.optimizer, ranks, chosen.path)
    every = settings.checkpoint_every
    train_vision = config.model.train_vision
    aside = Aside("checkpoint", pulse=pulse, at_least_s=LONG_S)
    return Saver(checkpoints, ranks, every, chosen.step, train_vision, deliver, aside), chosen


def _check_fallback(chosen: Chosen, run_dir: RunDir, events: EventLog) -> None:
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
    config: RunFile, run_dir: RunDir, ranks: Ranks, follow: Follow, pulse: Pulse
) -> Parts:
    """Of a rank other than 0."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = learner_of(config, store, ranks)
    watch = watch_of(config, follow)
    saver, chosen = build_saver(config, run_dir, learner, to_lead(follow), watch())
    as_adapters = _stand(config, learner) is not None
    learner.pulse = pulse
    learner.probe_every = config.orchestrator.probe_every
    family, materializer = learner.family, build_materializer(learner, store)
    learner.pixels = materializer.counts
    return Parts(
        feed=ShareFeed(
            follow,
            materializer,
            len(family.positions(1, ())[0]),
            chosen.step + 1,
            partial(stack, device=learner.device),
            watch(),
        ),
        learner=learner,
        keeper=Follower(learner, saver, as_adapters),
        pulse=learner.pulse,
        first_step=chosen.step,
    )
