"""Rollouts as graphs, with every token exactly as the engine saw it and images by reference.

A model call is prepared, sent and committed. Committed turns can train:

    turn = trace.extend(leaf, new_messages, renderer)    # or trace.prepare(history, renderer)
    ... turn.prompt_ids and turn.slots go to an engine ...
    node = turn.commit(completion_ids, logprobs, versions, finish_reason, pixel_digests)
    samples = flatten(trace)
"""

from sightline.trace.codec import decode_trace as decode_trace
from sightline.trace.codec import encode_trace as encode_trace
from sightline.trace.codec import encode_traces as encode_traces
from sightline.trace.codec import read_traces as read_traces
from sightline.trace.codec import write_traces as write_traces
from sightline.trace.node import Node as Node
from sightline.trace.node import PolicySpan as PolicySpan
from sightline.trace.sample import flatten as flatten
from sightline.trace.trace import Trace as Trace
from sightline.trace.turn import Turn as Turn
