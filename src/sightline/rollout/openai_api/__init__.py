"""OpenAI's chat completions as a dialect: read, answered and refused in one way at every door.

asked.py      a request: what is honoured, set aside, refused
images.py     images into the store, before anything else looks at the messages
answer.py     an answer, whole or as a stream
refusal.py    an error

The interception server of rollouts and the chat door of inference servers both speak it.
"""
