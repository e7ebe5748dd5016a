"""Channels between the processes of a run: one hub, any number of named spokes.

Processes with an event loop and processes with threads get the same guarantees:

- Messages from one sender to one receiver arrive once and in order.
- A message to a peer that never connected is an error.
- A send does not wait for the receiver.
- A process that replaces another of the same name takes its place at once.

Messages sent after `close`, or to a peer that is gone, are lost. Data that must survive a crash is
written to disk before it is announced here.
"""
