"""OpenAI's chat completions, for the interception server and for inference servers.

request.py          reads a request: fields that are supported, ignored or refused, and its images
completion.py       writes an answer, as one object or as a stream
error_response.py   writes an error
"""
