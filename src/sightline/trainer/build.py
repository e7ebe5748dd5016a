"""Constructs the trainer's parts from a run file. No flow here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sightline.compute.model import load_model, pick_device
from sightline.compute.transfer import stack
from sightline.config import Model, RunFile, Trainer
from sightline.families import load_family, load_renderer
from sightline.media import MediaStore
from sightline.monitor import EventLog, RunDir
from sightline.pack import Average, Cost
from sightline.pixels import Materializer
from sightline.trainer.checkpoint import Checkpoints, Ledger
from sightline.trainer.feed import Feed, Preparer, ReadyBatch
from sightline.trainer.keeper import Follower, Keeper
from sightline.trainer.learner import Learner
from sightline.trainer.loop import Parts
from sightline.trainer.optimizer import build_optimizer
from sightline.trainer.price import price_of
from sightline.trainer.pulse import Pulse
from sightline.trainer.ranks import ALONE, Follow, Lead, Ranks
from sightline.trainer.shard import join, shard
from sightline.trainer.spread import ShareFeed, Spread
from sightline.wire.control import Announce, Control

MEGABYTE = 1 << 20


def build_learner(
    model: Model, trainer: Trainer, store: MediaStore, steps: int, ranks: Ranks = ALONE
) -> Learner:
    device = torch.device(pick_device(trainer.device))
    if ranks.size > 1:
        join(ranks, device)
    family = load_family(model.path, **model.overrides())
    renderer = load_renderer(model.path, store, family)
    forward = load_model(model.path, family, str(device), model.dtype)
    forward.model.train()
    reference = None
    if trainer.kl_weight > 0:
        reference = load_model(model.path, family, str(device), model.dtype)
        reference.model.eval().requires_grad_(False)
    whole = reference_whole = None
    if ranks.size > 1:
        whole = shard(forward, ranks.size, device)
        if reference is not None:
            reference_whole = shard(reference, ranks.size, device, frozen=True)
    return Learner(
        forward=forward,
        reference=reference,
        optimizer=build_optimizer(forward, trainer, model.train_vision),
        family=family,
        config=trainer,
        steps=steps,
        pad_ids=renderer.pad_token_ids,
        vocab_size=renderer.vocab_size,
        device=device,
        ranks=ranks,
        whole=whole,
        reference_whole=reference_whole,
    )


def build(
    config: RunFile,
    run_dir: RunDir,
    announcements: Callable[[], Announce | None],
    send: Callable[[Control], None],
    ranks: Ranks = ALONE,
    lead: Lead | None = None,
) -> Parts:
    """Of rank 0, which hears the orchestrator; with `lead` it hands out what the others compute."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_learner(config.model, config.trainer, store, config.run.steps, ranks)
    checkpoints = Checkpoints(run_dir.checkpoints, config.trainer.keep_checkpoints)
    state = checkpoints.load(learner.forward.model, learner.optimizer)
    preparer = Preparer(
        family=learner.family,
        materializer=build_materializer(learner, store),
        limit=Cost(config.trainer.micro_batch_tokens, config.trainer.micro_batch_patches),
        max_bad_fraction=config.media.max_bad_fraction,
        average=Average(config.trainer.loss_average, config.trainer.loss_constant),
        stack=partial(stack, device=learner.device),
    )
    tell = (lead.fail,) if lead is not None else ()
    learner.pulse = Pulse(config.trainer.stuck_after_s, *tell)
    keeper = Keeper(
        run_dir=run_dir,
        learner=learner,
        checkpoints=checkpoints,
        ledger=Ledger(run_dir.ledger, state.step),
        events=EventLog(run_dir.metrics, "trainer"),
        send=send,
        source=Path(config.model.path),
        checkpoint_every=config.trainer.checkpoint_every,
        train_vision=config.model.train_vision,
        checkpoint_step=state.step,
        materializer=preparer.materializer,
    )
    hand_out: Callable[[ReadyBatch], ReadyBatch] = _keep_all
    if lead is not None:
        price = price_of(learner.forward, config.trainer.micro_batch_price)
        hand_out = Spread(lead, ranks.size, price, config.trainer.pixel_cache_mb * MEGABYTE)
    return Parts(
        feed=Feed(announcements, preparer, state.step + 1, hand_out),
        learner=learner,
        keeper=keeper,
        pulse=learner.pulse,
        first_step=state.step,
    )


def build_materializer(learner: Learner, store: MediaStore) -> Materializer:
    """Pixels are made ahead of the step, by as many threads as the process may compute with."""
    max_bytes = learner.config.pixel_cache_mb * MEGABYTE
    return Materializer(learner.family, store, max_bytes, threads=torch.get_num_threads())


def _keep_all(ready: ReadyBatch) -> ReadyBatch:
    return ready


def build_follower(config: RunFile, run_dir: RunDir, ranks: Ranks, follow: Follow) -> Parts:
    """Of a rank other than 0."""
    store = MediaStore(Path(config.media.root or run_dir.media))
    learner = build_learner(config.model, config.trainer, store, config.run.steps, ranks)
    checkpoints = Checkpoints(run_dir.checkpoints, config.trainer.keep_checkpoints)
    state = checkpoints.load(learner.forward.model, learner.optimizer)
    learner.pulse = Pulse(config.trainer.stuck_after_s, follow.fail)
    family = learner.family
    return Parts(
        feed=ShareFeed(
            follow,
            build_materializer(learner, store),
            len(family.positions(1, ())[0]),
            state.step + 1,
            partial(stack, device=learner.device),
        ),
        learner=learner,
        keeper=Follower(learner, config.trainer.checkpoint_every, state.step),
        pulse=learner.pulse,
        first_step=state.step,
    )
