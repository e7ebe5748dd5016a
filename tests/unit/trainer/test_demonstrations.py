"""Demonstrations of an environment, as conversations to imitate."""

from __future__ import annotations

from sightline.envs import load_environment
from sightline.envs.protocol import EnvironmentMix
from sightline.media import MediaStore
from sightline.trainer.conversations import TRAIN, Demonstrations


def test_demonstrations_of_a_mix_offer_the_tools_of_their_own_environment(
    store: MediaStore,
) -> None:
    walk = load_environment("grid_walk:GridWalk", {"actions": "tool"})
    mix = EnvironmentMix([(walk, 1.0), (load_environment("counting:Counting", {}), 1.0)])
    shown = Demonstrations(mix, store, seed=0)
    tools = {
        mix.choose_environment(i, "sft").name: shown.conversation(i, TRAIN).tools for i in range(16)
    }
    assert walk.tools is not None
    assert tools == {"grid_walk": walk.tools, "counting": None}
