"""The algorithms of reinforcement learning, which turn rewards into a loss.

    traces of a group --filters, verdicts----> which rollouts train
    a whole batch     --Algorithm.advantages-> one advantage per token
    trained tokens    --Algorithm.loss-------> one loss per token

The run file chooses an algorithm, or the functions of one, by a built-in name or as "module:name".
The loops know none of them by name. `algorithms` and `registry` load and check them.
"""
