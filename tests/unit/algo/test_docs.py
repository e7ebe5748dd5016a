"""The code of docs/custom_algorithms.md runs as written, and its error is the real one."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline.algo.algorithm import compute_advantages
from sightline.algo.algorithms import ALGORITHMS, build_small_batch, load_algorithm
from sightline.algo.credit import ADVANTAGES, AGGREGATIONS, CREDITS
from sightline.algo.losses import LOSSES, LossInputs, check_algorithm_loss, load_loss
from sightline.algo.needs import Needs
from sightline.algo.registry import load_advantage, load_filters
from sightline.config import AlgorithmConfig, FiltersConfig
from sightline.errors import ConfigError
from sightline.message import assistant
from sightline.trace import Node, PolicySpan, Trace
from sightline.trace.node import float32_array, int32_array

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE, OWN = ((DOCS / f"{name}.md").read_text() for name in ("algorithms", "custom_algorithms"))
LOSS, ADVANTAGE, FILTER, ALGORITHM = re.findall(r"```python\n(.*?)```", OWN, re.DOTALL)
[ERROR] = re.findall(r"```text\n(.*?)\n```", OWN, re.DOTALL)
[RUN_FILE] = [tomllib.loads(x) for x in re.findall(r"```toml\n(.*?)```", OWN, re.DOTALL)]


@pytest.fixture(autouse=True)
def my_algo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_algo.py").write_text("\n".join([LOSS, ADVANTAGE, FILTER, ALGORITHM]))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_algo", None)


def test_documented_loss_is_bounded_unlike_ppo() -> None:
    settings = AlgorithmConfig.model_validate(RUN_FILE["algorithm"])
    dual_clip = load_loss(settings.loss, settings.loss_args)
    inputs = LossInputs(
        torch.tensor([-1.0, -1.0, -1.0], requires_grad=True),
        torch.tensor([-1.0, -3.0, -3.0]),
        torch.tensor([1.0, -1.0, 1.0]),
        torch.zeros(3, dtype=torch.long),
    )
    token_loss, clipped = dual_clip(inputs)
    torch.testing.assert_close(token_loss, torch.tensor([-1.0, 4.0, -1.2]))
    assert clipped.tolist() == [0.0, 1.0, 1.0]
    ppo_loss = load_loss("ppo")(inputs).token_loss.detach()
    assert float(ppo_loss[1]) == pytest.approx(np.exp(2.0), rel=1e-6)


def test_documented_advantage_compares_with_the_median() -> None:
    advantage = load_advantage(RUN_FILE["algorithm"]["advantage"])
    np.testing.assert_allclose(advantage(np.array([1.0, 0.0, 0.25])), [0.75, -0.25, 0.0])


def test_documented_filter_drops_truncated_answers() -> None:
    (cut_off,) = load_filters(FiltersConfig.model_validate(RUN_FILE["filters"]))
    verdicts = {}
    for reason in ("stop", "length"):
        answer = Node(
            0, -1, assistant("4"), int32_array([3, 4]), sampled_start=1,
            logprobs=float32_array([-0.5]), finish_reason=reason,
            versions=(PolicySpan(version=0, epoch=0, start=0, stop=1),),
        )  # fmt: skip
        verdicts[reason] = cut_off(Trace(id="docs", nodes=[answer], reward=1.0))
    assert verdicts == {"stop": None, "length": "cut_off"}


def test_documented_algorithm_declares_needs_and_uses_the_whole_batch() -> None:
    reinforce = load_algorithm(AlgorithmConfig(name="my_algo:Reinforce"))
    assert reinforce.needs == Needs(reference_logprobs=True)
    first, second = compute_advantages(reinforce, build_small_batch(reinforce))
    assert first.tolist() == [0.25] * 4 and second.tolist() == [-0.25] * 2
    check_algorithm_loss("my_algo:Reinforce", reinforce.loss, reinforce.needs)


def test_each_example_runs_without_the_others(tmp_path: Path) -> None:
    blocks = {"loss": LOSS, "advantage": ADVANTAGE, "filter": FILTER, "own": ALGORITHM}
    for name, code in blocks.items():
        (tmp_path / f"only_{name}.py").write_text(code)
    load_loss("only_loss:dual_clip")
    load_advantage("only_advantage:above_median")
    load_filters(FiltersConfig(custom=("only_filter:cut_off",)))
    reinforce = load_algorithm(AlgorithmConfig(name="only_own:Reinforce"))
    check_algorithm_loss("only_own:Reinforce", reinforce.loss, reinforce.needs)


def test_documented_algorithm_has_at_most_fifteen_lines() -> None:
    assert "A complete algorithm takes fifteen lines" in OWN
    assert len([line for line in ALGORITHM.splitlines() if line.strip()]) <= 15


def test_documented_error_matches_the_actual_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_loss("my_algo:dual_clip", {"bounds": 4.0})
    assert str(caught.value) == ERROR


@pytest.mark.parametrize("table", [ADVANTAGES, CREDITS, LOSSES, AGGREGATIONS])
def test_every_built_in_function_is_documented(table: dict[str, Any]) -> None:
    assert [name for name in table if f'`"{name}"`' not in PAGE] == []
    assert [f.__name__ for f in table.values() if f"`{f.__name__}`" not in PAGE] == []


def test_every_setting_and_need_is_documented() -> None:
    names = [*AlgorithmConfig.model_fields, *Needs._fields, *ALGORITHMS]
    settings_page_only = {"measure_entropy"}
    text = PAGE + OWN + (DOCS / "teachers.md").read_text()
    missing = {name for name in names if f"`{name}`" not in text}
    assert missing <= settings_page_only | {"teacher"}
