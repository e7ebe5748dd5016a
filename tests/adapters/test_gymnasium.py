"""Real Gymnasium environments, played to their end by the tiny model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapters.conftest import check_trace, command, server_python
from PIL import Image

from sightline.envs import load_environment
from sightline.envs.gymnasium import _Episode
from sightline.envs.threads import SerialThread
from sightline.errors import ConfigError
from sightline.media import MediaStore
from sightline.trace import Trace

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(600)]

# The model says a digit from 1 to 5.
GAMES: dict[str, dict[str, Any]] = {
    "cart pole": {"id": "CartPole-v1", "actions": {"1": 0, "2": 1, "3": 0, "4": 1, "5": 0}},
    "frozen lake": {"id": "FrozenLake-v1", "actions": {"1": 0, "2": 1, "3": 2, "4": 3}},
    "grid world": {
        "id": "MiniGrid-Empty-5x5-v0",
        "module": "minigrid",
        "kwargs": {"max_steps": 20},
        "actions": {"1": 0, "2": 1, "3": 2, "4": 2, "5": 2},
    },
}


def make(**args: Any) -> Any:
    return load_environment("gymnasium", {"longest_side": 64, **args})


@pytest.mark.parametrize("game", GAMES)
def test_tiny_model_plays_a_full_episode(
    game: str, play: Callable[..., list[Trace]], media: Path
) -> None:
    traces = play(make(**GAMES[game]), num=4)
    for trace in traces:
        check_trace(trace, MediaStore(media))
        assert trace.rewards["over"] == 1.0, "the environment itself ended the episode"
        assert len(trace.turns) == trace.rewards["turns"] == len(trace.per_turn or [])
        assert trace.num_images_shown == len(trace.turns), "a picture every turn"
        assert not trace.forks, "every turn goes on from the last"
    by_model = [1 - trace.rewards["malformed"] for trace in traces]
    assert sum(by_model) > 0, "some moves are the model's own"
    print(f"{game}: turns {[len(t.turns) for t in traces]}, by the model {by_model}")
    if game == "cart pole":
        for trace in traces:
            assert trace.rewards["return"] == len(trace.turns), "a point for every step upright"


def test_concurrent_rendering_matches_sequential_rendering() -> None:
    """pygame stores a polygon's corners in one place.

    Without a lock, a few in a hundred are wrong.
    """
    env = make(**GAMES["cart pole"])

    def draw(seed: int) -> bytes:
        episode = _Episode(SerialThread("drawing"), env)
        episode.start(seed)
        pictures: list[bytes] = []

        class Shown:
            def put(self, picture: Image.Image) -> str:
                pictures.append(picture.tobytes())
                return "shown"

        asyncio.run(episode.observe(Shown(), is_first=True))  # type: ignore[arg-type]
        episode.thread.end(episode.close)
        return pictures[0]

    alone = {seed: draw(seed) for seed in range(2)}
    with ThreadPoolExecutor(2) as threads:
        for _ in range(300):
            assert dict(zip(alone, threads.map(draw, alone), strict=True)) == alone


def test_invalid_action_ends_skips_or_is_replaced(
    play: Callable[..., list[Trace]],
) -> None:
    never = {"never": 0}
    (ends,) = play(make(id="CartPole-v1", actions=never, on_malformed="end"))
    assert len(ends.turns) == 1 and ends.reward == pytest.approx(-0.1)
    (skips,) = play(make(id="CartPole-v1", actions=never, on_malformed="skip", max_turns=3))
    assert len(skips.turns) == 3 and skips.rewards["over"] == 0.0
    assert len({n.slots[0].item.ref.digest for n in skips.nodes if n.slots}) == 1
    (goes_on,) = play(make(id="CartPole-v1", actions=never, on_malformed="random"))
    assert goes_on.rewards["over"] == 1.0 and goes_on.rewards["malformed"] == 1.0


def register_dark() -> None:
    import gymnasium

    class Dark(gymnasium.Env):
        metadata: dict[str, Any] = {"render_modes": ["ansi"]}
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Discrete(2)

        def __init__(self, render_mode: str | None = None) -> None:
            self.render_mode = render_mode

        def reset(self, **options: Any) -> Any:
            return 0, {}

        def render(self) -> Any:
            return None

    gymnasium.register("Dark-v0", Dark, disable_env_checker=True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"id": "NoSuchGame-v0"}, "check .env.args. id"),
        ({"id": "MountainCarContinuous-v0"}, "set it to a parser"),
        ({"id": "CliffWalking-v1", "kwargs": {"no_such": 1}}, "kwargs"),
        ({"id": "Dark-v0"}, "does not draw pictures"),
        ({"id": "CartPole-v1", "actions": "no_such_module:Parser"}, "no module named"),
        ({"id": "CartPole-v1", "actions": []}, "list each action"),
        ({"id": "CartPole-v1", "on_malformed": "shout"}, "use one of"),
    ],
)
def test_unplayable_environment_is_refused_at_load(args: dict[str, Any], says: str) -> None:
    if args["id"] == "Dark-v0":
        register_dark()
    with pytest.raises(ConfigError, match=says):
        make(**args)


WHOLE_RUN = """
[run]
name = "lake"
steps = 2

[model]
path = "{model}"

[env]
name = "gymnasium"

[env.args]
id = "FrozenLake-v1"
longest_side = 64
actions = {{ "1" = 0, "2" = 1, "3" = 2, "4" = 3 }}

[rollout]
python = "{python}"
max_tokens = 8
max_turns = 12

[orchestrator]
groups_per_step = 2
group_size = 4

[algorithm]
kl_coef = 0.01

[inference]
max_model_len = 4096

[eval]
tasks = 4
"""


def test_run_trains_with_a_package_installed_only_for_workers(model: Path, tmp_path: Path) -> None:
    absent = subprocess.run([server_python(), "-c", "import gymnasium"], capture_output=True)
    assert absent.returncode != 0, "the project's environment has no gymnasium"
    file = tmp_path / "lake.toml"
    file.write_text(WHOLE_RUN.format(model=model, python=sys.executable))
    words = command("rl", "--plain", file)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "lake-001"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["images_shown"] > 0 and summary["bad_media"] == 0
