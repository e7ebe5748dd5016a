"""The functions of docs/algorithms.md are loaded as they stand there, and their errors are real."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline.algo.advantages import ADVANTAGES
from sightline.algo.aggregation import AGGREGATIONS
from sightline.algo.credit import CREDITS
from sightline.algo.losses import LOSSES, LossInputs, load_loss
from sightline.algo.registry import load_advantage, load_filters
from sightline.config import FiltersConfig
from sightline.errors import ConfigError
from sightline.message import assistant
from sightline.trace import Node, PolicySpan, Trace
from sightline.trace.node import float32_array, int32_array

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()
LOSS, ADVANTAGE, FILTER, LOADING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ERRORS = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
WRONG = """
def detached(inputs):
    r = inputs.importance_ratios().detach()
    return LossOutput(-r * inputs.advantages, torch.zeros_like(r))

def only_mean(rewards):
    return float(rewards.mean())

def second_turn(trace):
    return "short" if len(trace.turns[1].logprobs) < 4 else None
"""


@pytest.fixture(autouse=True)
def my_algo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_algo.py").write_text("\n".join([LOSS, ADVANTAGE, FILTER, WRONG]))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_algo", None)


def run_file() -> dict[str, Any]:
    """The settings that the page writes into a run file; the last of a key counts."""
    values: dict[str, dict[str, Any]] = {}
    for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL):
        for section, keys in tomllib.loads(block).items():
            values.setdefault(section, {}).update(keys)
    return values


def test_the_loss_of_the_docs_is_bounded_where_that_of_ppo_is_not() -> None:
    trainer = run_file()["trainer"]
    dual_clip = load_loss(trainer["loss"], trainer["loss_args"])
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.tensor([-1.0, -3.0, -3.0]),
        torch.tensor([1.0, -1.0, 1.0]),
        torch.zeros(3, dtype=torch.long),
    )
    found = dual_clip(inputs)
    torch.testing.assert_close(found.token_loss, torch.tensor([-1.0, 4.0, -1.2]))
    assert found.clipped.tolist() == [0.0, 1.0, 1.0]
    of_ppo = load_loss("ppo")(inputs).token_loss.detach()
    assert float(of_ppo[1]) == pytest.approx(np.exp(2.0), rel=1e-6)


def test_the_loss_of_the_docs_has_15_lines() -> None:
    assert len([line for line in LOSS.splitlines() if line.strip()]) <= 15


def test_the_advantage_of_the_docs_compares_with_the_others() -> None:
    advantage = load_advantage(run_file()["orchestrator"]["advantage"])
    np.testing.assert_allclose(advantage(np.array([1.0, 0.0, 0.5])), [0.75, -0.75, 0.0])


def test_the_filter_of_the_docs_drops_what_was_cut_off() -> None:
    (cut_off,) = load_filters(FiltersConfig.model_validate(run_file()["filters"]))
    assert cut_off(trace_that_ended("stop")) is None
    assert cut_off(trace_that_ended("length")) == "cut_off"


def trace_that_ended(finish_reason: str) -> Trace:
    answer = Node(
        0,
        -1,
        assistant("4"),
        int32_array([3, 4]),
        sampled_start=1,
        logprobs=float32_array([-0.5]),
        versions=(PolicySpan(version=0, epoch=0, start=0, stop=1),),
        finish_reason=finish_reason,
    )
    return Trace(id="docs", nodes=[answer], reward=1.0)


def test_the_functions_of_the_docs_load_as_they_say() -> None:
    names: dict[str, Any] = {}
    exec(compile(LOADING, "algorithms.md", "exec"), names)
    assert callable(names["loss"]) and callable(names["advantage"]) and len(names["filters"]) == 1


CAUSES: list[Callable[[], Any]] = [
    lambda: load_loss("my_algo:dual_clip", {"bounds": 4.0}),
    lambda: load_loss("my_algo:detached"),
    lambda: load_advantage("my_algo:only_mean"),
    lambda: load_filters(FiltersConfig(custom=("my_algo:second_turn",))),
]


@pytest.mark.parametrize("number", range(len(CAUSES)))
def test_the_errors_of_the_docs_are_those_that_people_see(number: int) -> None:
    with pytest.raises(ConfigError) as caught:
        CAUSES[number]()
    assert len(ERRORS) == len(CAUSES)
    assert str(caught.value) == ERRORS[number]


@pytest.mark.parametrize("table", [ADVANTAGES, CREDITS, LOSSES, AGGREGATIONS])
def test_every_built_in_function_is_on_the_page(table: dict[str, Any]) -> None:
    assert [name for name in table if f'`"{name}"`' not in PAGE] == []
    assert [f.__name__ for f in table.values() if f"`{f.__name__}`" not in PAGE] == []
