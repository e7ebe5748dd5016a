"""The page about rewards: its examples run, and its table lists every reward with its arguments."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from unit.envs.test_docs import read_blocks

from sightline.config.load import load_object
from sightline.envs.rewards import REWARDS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "rewards.md"


def test_examples_run() -> None:
    for text in read_blocks(PAGE):
        exec(compile(text, PAGE.name, "exec"), {})


def test_table_lists_every_reward_with_its_arguments() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)\((.*?)\)` \|", PAGE.read_text(), re.M)
    assert {name: path.replace(".", ":") for name, path, _ in rows} == REWARDS
    for _, path, args in rows:
        function = load_object(f"sightline.envs.rewards.{path.replace('.', ':')}", "reward")
        named = {word.partition("=")[0].strip() for word in args.split(",")} - {"...", ""}
        known = set(inspect.signature(function).parameters) - {"answer", "expected", "row"}
        assert named == known if "..." not in args.split(", ") else named <= known, path
