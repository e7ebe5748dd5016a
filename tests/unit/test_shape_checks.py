"""Annotated shapes are checked while tests run. A wrong shape raises with its name."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from shape_checks import CheckingFinder

ROOT = Path(__file__).resolve().parents[2]
ZEROS = torch.zeros(3)


@pytest.fixture(scope="module")
def losses() -> Any:
    """A second copy of a module, as `make test` imports the first."""
    match = re.search(r"^SHAPED := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert match, "the Makefile says which modules are checked"
    modules = match[1].split(",")
    assert [module for module in modules if find_spec(module) is None] == []
    name = "sightline.algo.losses"
    path = list(import_module("sightline.algo").__path__)
    spec = CheckingFinder(modules).find_spec(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "given", "where"),
    [
        ("mismatch_kl", (ZEROS, torch.zeros(4)), "mismatch_kl: sampler_logprobs"),
        ("exact_kl", (torch.zeros(2, 4), torch.zeros(2, 5), ZEROS[:1].long()), "exact_kl: log_q"),
        ("mismatch_kl", (ZEROS.long(), ZEROS), "mismatch_kl: logprobs"),
        ("LossInputs", (ZEROS, torch.zeros(4), ZEROS, ZEROS.long()), "__init__: "),
    ],
)
def test_tensor_of_a_wrong_shape_raises_by_name(
    losses: Any, name: str, given: tuple[torch.Tensor, ...], where: str
) -> None:
    for _ in range(2):  # what was wrong once stays wrong
        with pytest.raises(TypeError, match=where):
            getattr(losses, name)(*given)


def test_correct_shapes_pass_repeatedly_and_wrong_ones_still_raise(losses: Any) -> None:
    for _ in range(2):
        losses.ppo(losses.LossInputs(ZEROS, ZEROS, ZEROS, ZEROS.long()))
        losses.mismatch_kl(ZEROS, ZEROS)
    with pytest.raises(TypeError, match="mismatch_kl: sampler_logprobs"):
        losses.mismatch_kl(ZEROS, torch.zeros(2))
