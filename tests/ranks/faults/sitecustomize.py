"""Imported by every Python that a test starts with this folder on its path.

It breaks one process. FAULT names the fault, VICTIM the process (trainer, trainer-1). The fault
happens at step 2.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any

AT_STEP = 2


def _break() -> None:
    import torch

    from sightline.errors import MediaError
    from sightline.trainer import feed, learner, micro_batch_pixels, run_writer
    from sightline.wire import rank_messages as share

    fault = os.environ["FAULT"]
    compute_loss, update = learner.Learner.compute_loss, learner.Learner.update

    def broken_loss(self: Any, ready: Any, prior: Any) -> Any:
        is_due = ready.batch.step == AT_STEP
        if is_due and fault == "error":
            raise RuntimeError("a fault in the forward pass")
        if is_due and fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory, or so")
        if is_due and fault == "stuck":
            time.sleep(3600)
        loss = compute_loss(self, ready, prior)
        if is_due and fault == "nan":
            return dataclasses.replace(loss, total=loss.total * float("nan"))
        return loss

    def broken_update(self: Any, step: int) -> float:
        if step == AT_STEP and fault == "update":
            raise RuntimeError("a fault between two collectives")
        return update(self, step)

    learner.Learner.compute_loss = broken_loss  # type: ignore[method-assign]
    learner.Learner.update = broken_update  # type: ignore[method-assign]
    if fault == "transport":

        def garbled(sender: str, data: bytes) -> Any:
            message = decode_from(sender, data)
            if getattr(message, "step", 0) == AT_STEP:
                raise RuntimeError("a fault in the transport")
            return message

        decode_from = share.decode_from
        share.decode_from = garbled
    if fault == "publish":

        def unwritable(self: Any, draft: Any, *rest: Any) -> None:
            if draft.version == AT_STEP:
                raise OSError("a fault in publishing")
            write(self, draft, *rest)

        write = run_writer.AsyncPublisher._publish
        run_writer.AsyncPublisher._publish = unwritable  # type: ignore[method-assign]
    if fault == "packing":

        def unpackable(samples: Any, step: int, *rest: Any) -> Any:
            if step == AT_STEP:
                raise RuntimeError("a fault in packing")
            return pack(samples, step, *rest)

        pack = feed.pack
        feed.pack = unpackable
    if fault == "feed":

        def stands_still(self: Any, batch: Any, digest: str, *rest: Any) -> Any:
            if batch.step == AT_STEP:
                time.sleep(3600)
            return make_ready(self, batch, digest, *rest)

        make_ready = feed.BatchPreparer.prepare
        feed.BatchPreparer.prepare = stands_still  # type: ignore[method-assign]
    if fault == "media":
        # After the lead has verified the image, a rank cannot read it.
        def unreadable(self: Any, pack: Any) -> Any:
            if pack.step == AT_STEP:
                raise MediaError("image 0123 is not in the store", "repair the store")
            return stack(self, pack)

        stack = micro_batch_pixels.MicroBatchPixels.stack
        micro_batch_pixels.MicroBatchPixels.stack = unreadable  # type: ignore[method-assign]

        def unpacked(self: Any, batch: Any, digest: str, *rest: Any) -> Any:
            if batch.step == AT_STEP:
                raise MediaError("image 0123 is not in the store", "repair the store")
            return prepare(self, batch, digest, *rest)

        prepare = feed.BatchPreparer.prepare
        feed.BatchPreparer.prepare = unpacked  # type: ignore[method-assign]


if os.environ.get("VICTIM") in sys.orig_argv and "process" in sys.orig_argv:
    _break()
