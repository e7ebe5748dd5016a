"""OpenAI's chat completions: read, answered and refused in one way at every endpoint of ours.

request.py          a request: what is honoured, ignored, refused; its images, put into the store
completion.py       an answer, as one object or as a stream
error_response.py   an error

The interception server of rollouts and the chat endpoint of inference servers both speak it.
"""
