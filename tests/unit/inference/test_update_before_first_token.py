"""If weights change before a request's first token, its images go through the new tower."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import picture
from serving import Reference

from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.engine import TorchEngine, _WeightSwap
from sightline.inference.torch_engine.row_table import TorchRequest
from sightline.media import MediaRef, MediaStore
from sightline.message import user
from sightline.pixels import Materializer
from sightline.render import Rendered
from sightline.wire.generate import SamplingParams
from sightline.wire.weights import Manifest

CHUNK = 8


class GatedStore(MediaStore):
    """Returns images when the gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()

    def image(self, ref: MediaRef):  # type: ignore[no-untyped-def]
        assert self.gate.wait(30)
        return super().image(ref)


class Stepped:
    """An engine that the test steps, and transformers with the next weights."""

    def __init__(self, model: Path, store: MediaStore) -> None:
        self.changed = Reference(model, store)
        with torch.no_grad():
            for parameter in self.changed.model.parameters():
                parameter.mul_(1.2)
        spec = ServerSpec.of(
            path=model,
            media_roots=(store.root,),
            device="cpu",
            max_num_seqs=4,
            max_model_len=512,
            prefill_chunk_tokens=CHUNK,
        )
        family, pads = self.changed.family, self.changed.renderer.pad_token_ids
        gated = GatedStore(store.root)
        self.gate = gated.gate
        self.engine: TorchEngine = build_engine(
            spec, family, Materializer(family, gated, 1 << 20), pads
        )

    def submit(self, rendered: Rendered) -> TorchRequest:
        keys = [slot.item.key for slot in rendered.slots]
        prompt = np.array(rendered.token_ids, dtype=np.int32)
        request = TorchRequest(prompt, rendered.slots, keys, SamplingParams(max_tokens=4), seed=0)
        self.engine.submit([request])
        return request

    def compute(self, steps: int) -> None:
        """Run `steps` engine steps, and retry a step that has to wait for pixels."""
        with torch.inference_mode():
            for _ in range(steps):
                while not self.engine._run_once():
                    assert self.engine._event.wait(30)

    def finish(self, request: TorchRequest) -> None:
        while not request.finish_reason:
            assert request.error is None
            self.compute(1)

    def update(self) -> None:
        tensors = dict(self.changed.model.named_parameters())
        swap = _WeightSwap(Manifest(1, 1, []), tensors, Future())
        with torch.inference_mode():
            self.engine._apply_swap(swap)
        swap.done.result(0)

    def check(self, request: TorchRequest, rendered: Rendered) -> None:
        """The whole answer, including images, comes from the new weights."""
        assert [span.version for span in request.spans] == [self.engine.manifest.label]
        wanted = self.changed.logprobs(rendered.token_ids, request.tokens, rendered.slots)
        np.testing.assert_allclose(request.logprobs, wanted, atol=1e-5)


@pytest.fixture
def stepped(tiny_model: Path, store: MediaStore) -> Stepped:
    return Stepped(tiny_model, store)


def test_update_during_prefill(stepped: Stepped, store: MediaStore) -> None:
    ref = store.put(picture(1, 64, 96))
    rendered = stepped.changed.renderer.render([user(ref, "What is it? " * 4)])
    request = stepped.submit(rendered)
    stepped.compute(2)
    [slot] = rendered.slots
    computed = int(stepped.engine.scheduler.rows.computed[request.row])
    assert slot.offset < computed < len(rendered.token_ids), "the image has been encoded"
    stepped.update()
    stepped.finish(request)
    stepped.check(request, rendered)


def test_update_while_pixels_load(stepped: Stepped, store: MediaStore) -> None:
    """The first image's features were cached, and the second image has not arrived."""
    first, second = store.put(picture(2)), store.put(picture(3))
    stepped.finish(stepped.submit(stepped.changed.renderer.render([user(first, "One.")])))
    rendered = stepped.changed.renderer.render([user("Both.", first, second)])
    stepped.gate.clear()
    request = stepped.submit(rendered)
    with torch.inference_mode():
        assert not stepped.engine._run_once()
    assert request in stepped.engine.scheduler.loading and len(request.features) == 1
    stepped.update()
    stepped.gate.set()
    stepped.finish(request)
    stepped.check(request, rendered)
