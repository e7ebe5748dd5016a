"""Environments: tasks, and a rollout that talks to the model through a chat.

An environment is a class with tasks and a `rollout(task, chat)` method, async or not, that returns
a reward. Workers load neither torch nor transformers.
"""

from sightline.envs.conversation import Conversation, last_images, last_turns
from sightline.envs.protocol import Chat, Environment, Outcome, Reward, Task, load_environment
from sightline.envs.threads import BlockingChat

__all__ = [
    "BlockingChat",
    "Chat",
    "Conversation",
    "Environment",
    "Outcome",
    "Reward",
    "Task",
    "last_images",
    "last_turns",
    "load_environment",
]
