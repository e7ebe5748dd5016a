"""Environments: tasks, and a rollout that talks to the model through a chat.

An environment is a class with tasks and `rollout(task, chat)`, async or not, which returns a
reward.
Workers load neither torch nor transformers.
"""

from sightline.envs.protocol import (
    BlockingChat,
    Chat,
    Environment,
    Outcome,
    Reward,
    Task,
    load_environment,
)

__all__ = [
    "BlockingChat",
    "Chat",
    "Environment",
    "Outcome",
    "Reward",
    "Task",
    "load_environment",
]
