"""Environments: tasks, and a rollout that talks to the model through a chat.

An environment is a class with tasks and `async rollout(task, chat)`, which returns a reward.
Workers load neither torch nor transformers.
"""

from sightline.envs.protocol import Chat, Environment, Outcome, Task, load_environment

__all__ = ["Chat", "Environment", "Outcome", "Task", "load_environment"]
