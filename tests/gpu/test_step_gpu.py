"""A step on a real device: when the host waits for it, and what leaves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sightline.compute.attention import pattern_of
from sightline.compute.host_copy import HostCopy
from sightline.compute.transfer import send
from sightline.trainer.laps import Laps
from sightline.trainer.learner import SUMS, _measure
from sightline.trainer.loss import mismatch_kl
from sightline.trainer.score import Scored
from sightline.trainer.tally import Tally

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]


def test_a_copy_is_page_locked_and_keeps_what_the_device_held() -> None:
    weights = {"a": torch.randn(2048, 2048, device="cuda"), "b": torch.arange(9, device="cuda")}
    wanted = weights["a"].to(torch.bfloat16).cpu()
    copy = HostCopy()
    torch.cuda._sleep(200_000_000)
    copy.take(weights, dtype=torch.bfloat16)
    weights["a"].zero_()  # asked for after the copy, which has not happened yet
    held = copy.tensors()
    assert held["a"].is_pinned() and held["a"].equal(wanted)
    assert held["b"].equal(torch.arange(9))
    places = {name: tensor.data_ptr() for name, tensor in held.items()}
    copy.take(weights, dtype=torch.bfloat16)
    assert {name: tensor.data_ptr() for name, tensor in copy.tensors().items()} == places


def test_laps_are_times_of_the_device() -> None:
    laps = Laps(torch.device("cuda"))
    torch.cuda._sleep(100_000_000)
    laps.end("forward")
    laps.end("backward")
    found = laps.seconds()
    assert found["forward"] > 10 * found["backward"]


def test_measuring_a_micro_batch_does_not_wait_for_the_device() -> None:
    device = torch.device("cuda")
    num = 5000
    rng = np.random.default_rng(0)
    own = rng.random(num) < 0.5
    logprobs, old = (send(-rng.random(num, dtype=np.float32), device) for _ in range(2))
    scored = Scored(logprobs, -logprobs, None)
    tally, laps = Tally(SUMS), Laps(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pattern_of(np.full(num, num), device, torch.bfloat16)
        _measure(tally, scored, old, own)
        laps.end("forward")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = tally.read()
    kl = mismatch_kl(logprobs, old).cpu().double().numpy()
    assert found["fresh_tokens"] == own.sum() and found["tokens"] == num
    assert found["fresh_kl"] == pytest.approx(kl[own].sum(), rel=1e-5)
    assert found["older_kl"] == pytest.approx(kl[~own].sum(), rel=1e-5)
