"""The interception server: any program with an OpenAI SDK talks to the model that is trained.

asked.py      a request in OpenAI's shape: what is honoured, set aside, refused
images.py     images into the store, before anything else looks at the messages
answer.py     an answer in OpenAI's shape, whole or as a stream
refusal.py    an error in OpenAI's shape
server.py     one port a worker, one key a rollout
"""

from sightline.rollout.intercept.server import Interception

__all__ = ["Interception"]
