"""Channels between the processes of a run: one hub, any number of named spokes.

Promises, the same in memory and over ZMQ: messages of one sender to one receiver arrive once
and in order; a message to a peer that never said hello is an error, not a silence; a send does
not wait for the receiver to read. What must survive the death of a process is on disk before
it is announced here.
"""
