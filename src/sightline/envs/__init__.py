"""Environments: tasks, and a rollout that talks to the model through a chat.

An environment is a class with tasks and a `rollout(task, chat)` method, async or not, that returns
a reward. Workers load neither torch nor transformers.
"""

from sightline.envs.conversation import Conversation as Conversation
from sightline.envs.conversation import last_images as last_images
from sightline.envs.conversation import last_turns as last_turns
from sightline.envs.protocol import Chat as Chat
from sightline.envs.protocol import Environment as Environment
from sightline.envs.protocol import Outcome as Outcome
from sightline.envs.protocol import Reward as Reward
from sightline.envs.protocol import Task as Task
from sightline.envs.protocol import load_environment as load_environment
from sightline.envs.threads import BlockingChat as BlockingChat
