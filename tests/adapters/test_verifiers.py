"""An unchanged verifiers environment, trained through the rollout's endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters.conftest import check_trace

from sightline.envs import load_environment
from sightline.errors import ConfigError
from sightline.media import MediaStore
from sightline.trace import Trace, flatten

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def taskset_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers finds tasksets by the name of a top-level module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def make(**args: Any) -> Any:
    return load_environment("verifiers", {"taskset": "codeword_env", **args})


def test_multi_turn_environment_with_images_runs_unmodified(
    play: Callable[..., list[Trace]], media: Path
) -> None:
    env = make()
    traces = play(env, num=4)
    for i, trace in enumerate(traces):
        check_trace(trace, MediaStore(media))
        assert len(trace.turns) == 3 and trace.num_images_shown == 3
        assert len(trace.branches()) == 1, "what the agent sends again is known again"
        text = "".join(turn.message.text for turn in trace.turns)
        answer = env.task(i, "train").data.data.answer
        right = sum(a == b for a, b in zip(text, answer, strict=False)) / 3
        assert trace.reward == pytest.approx(right) == pytest.approx(trace.rewards["letters"])
        (sample,) = flatten(trace, lambda node: 1.0)
        assert len(sample.slots) == 3 and len(sample.segments) == 3
    assert not [name for name in os.environ if name.startswith("SIGHTLINE_KEY_")]
    print(f"rewards {[trace.reward for trace in traces]}")


def test_tasks_come_from_the_taskset_and_splits_are_disjoint() -> None:
    env = make()
    train = {env.task(i, "train").data.data.idx for i in range(40)}
    held_out = {env.task(i, "eval").data.data.idx for i in range(40)}
    assert train | held_out == set(range(20)) and not train & held_out
    assert held_out == {0, 10}


def test_harness_failure_breaks_the_rollout_with_its_cause(
    play: Callable[..., list[Trace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import codeword_env

    monkeypatch.setitem(codeword_env.COLORS, "1", "no such colour")
    traces = play(make(), num=4)
    broken = [trace for trace in traces if trace.error]
    assert broken and all("no such colour" in trace.error for trace in broken)


@pytest.mark.parametrize(
    "args", [{"taskset": "no_such_taskset"}, {"taskset": ""}, {"eval_every": 1}]
)
def test_unloadable_environment_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**args)
