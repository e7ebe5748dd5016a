"""The interception server: any program with an OpenAI SDK talks to the model that is trained.

One port a worker, one key a rollout. It speaks `sightline.rollout.openai_api`.
"""

from sightline.rollout.intercept.server import InterceptionServer

__all__ = ["InterceptionServer"]
