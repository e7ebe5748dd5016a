"""Mathematics in LaTeX, compared by math-verify in a child process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sightline.envs.rewards.latex import LatexMath
from sightline.errors import ConfigError


@pytest.fixture(scope="module")
def math() -> Iterator[LatexMath]:
    math = LatexMath(cpu_s=1)
    yield math
    math.close()


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        (r"So it is $\frac{1}{2}$.", "0.5", 1),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1),
        ("1/2", r"$\frac{1}{2}$", 1),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        (r"\boxed{3}", "4", 0),
        (r"first $3$, then \boxed{4}", "4", 1),
        (r"$(1, 2)$", "(1,2)", 1),
        (r"\boxed{4}", ["3", "4"], 1),
        (r"\boxed{4}", 4, 1),
        ("no idea", "4", 0),
        ("", "4", 0),
        (r"\frac{", "4", 0),
        (r"\frac{\pi}{2}", r"\pi/2", 1),  # what `answer_pattern = "boxed"` leaves
        ("x^2 + 2x + 1", "(x+1)^2", 1),
        ("(1, 2)", "(1,2)", 1),
        (r"\$5", "5", 1),
        ("3x + 2", "2", 0),
        ("the answer is 4", "4", 1),
        ("**4**", "4", 1),
    ],
)
def test_equal_expressions_earn_one(
    math: LatexMath, answer: str, expected: Any, reward: float
) -> None:
    assert math(answer, expected) == reward


def test_endless_computation_earns_zero_and_the_next_answer_counts(math: LatexMath) -> None:
    assert math(r"$\boxed{9^{9^{9^{9^9}}}}$", "4") == 0
    assert math("$4$", "4") == 1


def test_child_that_was_killed_is_replaced(math: LatexMath) -> None:
    assert math("$4$", "4") == 1
    assert math._process is not None
    math._process.kill()
    math._process.wait()
    assert math("$4$", "4") == 1


@pytest.mark.parametrize("expected", [None, [], ""])
def test_reference_without_an_expression_raises(math: LatexMath, expected: Any) -> None:
    with pytest.raises(ValueError, match="the reference"):
        math("$4$", expected)


def test_library_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.startswith("math_verify")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="not installed") as refused:
        LatexMath()
    assert "sightline-rl[rewards]" in refused.value.fix
