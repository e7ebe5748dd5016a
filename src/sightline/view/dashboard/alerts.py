"""Alerts about a run that ignores its images, diverges, collapses or has no training signal.

The rules compare means over the last steps, so that a single step raises no alert. An alert
disappears when the run recovers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sightline.view.dashboard.history import MetricsHistory
from sightline.view.formatting import percent, short

WINDOW = 10
"""Number of steps in a mean."""
FALLEN = 0.5
"""A reward below this fraction of its best value has collapsed."""
NEAR_BEST = 0.9
"""Low entropy raises no alert if the reward is above this fraction of its best value."""
NO_ENTROPY = 0.01
"""Entropy in nats per token below which almost all samples are equal."""
NO_SIGNAL = 0.95
"""Fraction of groups without signal that raises an alert."""
EXPLODED = 20.0
"""Maximum ratio of a gradient norm to its median."""
RISEN = 2.0
"""Maximum ratio of a supervised loss to its best value."""


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    """blind, diverges, collapses or no_signal."""
    text: str


def find_alerts(history: MetricsHistory) -> list[Alert]:
    alerts = [_blind(history), _diverges(history), _collapses(history), _learns_nothing(history)]
    return [alert for alert in alerts if alert is not None]


def _blind(history: MetricsHistory) -> Alert | None:
    probe = history.probe
    if probe is None or not probe.values.get("is_blind"):
        return None
    finding = probe.values.get("words") or "swapping its images changes nothing"
    return Alert("blind", f"The model ignores its images (step {probe.step}): {finding}")


def _diverges(history: MetricsHistory) -> Alert | None:
    for name, step in history.not_finite.items():
        return Alert("diverges", f"{name} is not a finite number at step {step}.")
    norms = history.column("train", "grad_norm")[1]
    if len(norms) > WINDOW and (usual := float(np.median(norms[:-3]))) > 0:
        now = float(norms[-3:].mean())
        if now > EXPLODED * usual:
            text = f"The gradient norm is {short(now)}. Its median was {short(usual)}."
            return Alert("diverges", text)
    losses = _means(history.column("sft", "loss")[1])
    if len(losses) and losses[-1] > RISEN * (best := float(losses.min())) > 0:
        text = f"The loss is {short(float(losses[-1]))}. Its best was {short(best)}."
        return Alert("diverges", text)
    return None


def _collapses(history: MetricsHistory) -> Alert | None:
    steps, rewards = history.column("step", "reward")
    means = _means(rewards)
    if not len(means):
        return None
    best, now, highest = float(means.max()), float(means[-1]), float(rewards.max())
    noise = float(rewards[-WINDOW:].std()) / math.sqrt(WINDOW)
    if best > 0 and now < FALLEN * best and best - now > 3 * noise:
        at = steps[int(means.argmax()) + WINDOW - 1]
        text = f"The reward fell to {short(now)} from {short(best)} around step {at}."
        return Alert("collapses", text)
    entropies = _means(history.column("train", "entropy")[1])
    if len(entropies) and entropies[-1] < NO_ENTROPY and now < NEAR_BEST * highest:
        text = (
            f"The entropy is {short(float(entropies[-1]))} nats per token: siblings are almost "
            f"equal. The reward is {short(now)}. Its best was {short(highest)}."
        )
        return Alert("collapses", text)
    return None


def _learns_nothing(history: MetricsHistory) -> Alert | None:
    rates = _means(history.column("step", "no_signal_rate")[1])
    rewards = _means(history.column("step", "reward")[1])
    if not len(rates) or rates[-1] < NO_SIGNAL or history.goal is not None or not len(rewards):
        return None
    now = float(rewards[-1])
    text = (
        f"{percent(float(rates[-1]))} of the groups have no signal: all siblings earn the same "
        f"reward, {short(now)} on average. The tasks may be too easy or too hard."
    )
    return Alert("no_signal", text)


def _means(values: np.ndarray) -> np.ndarray:
    """Return sliding means over WINDOW values, newest last. Empty for fewer values."""
    if len(values) < WINDOW:
        return values[:0]
    return np.lib.stride_tricks.sliding_window_view(values, WINDOW).mean(axis=1)
