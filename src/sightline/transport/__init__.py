"""Channels between the processes of a run: one hub, any number of named spokes.

Promises, the same for processes with an event loop and for those with threads: messages of one
sender to one receiver arrive once and in order; a message to a peer that never said hello is an
error, not a silence; a send does not wait for the receiver to read; a process that replaces one of
the same name takes its place at once. What is sent after `close`, or to a peer that has gone, is
lost: what must survive the death of a process is on disk before it is announced here.
"""
