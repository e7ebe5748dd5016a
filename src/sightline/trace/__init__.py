"""Rollouts as graphs, with every token exactly as the engine saw it and images by reference.

A model call is prepared, sent and committed. Committed turns can train:

    turn = trace.extend(leaf, new_messages, renderer)    # or trace.prepare(history, renderer)
    ... turn.prompt_ids and turn.slots go to an engine ...
    node = turn.commit(completion_ids, logprobs, versions, finish_reason, pixel_digests)
    samples = flatten(trace)
"""

from sightline.trace.codec import (
    decode_trace,
    encode_trace,
    encode_traces,
    read_traces,
    write_traces,
)
from sightline.trace.node import Node, PolicySpan
from sightline.trace.sample import flatten
from sightline.trace.trace import Trace
from sightline.trace.turn import Turn

__all__ = [
    "Node",
    "PolicySpan",
    "Trace",
    "Turn",
    "decode_trace",
    "encode_trace",
    "encode_traces",
    "flatten",
    "read_traces",
    "write_traces",
]
