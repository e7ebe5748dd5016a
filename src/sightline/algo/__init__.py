"""What makes it reinforcement learning: the functions that turn rewards into a loss.

    rewards of a group --advantages, credit--> one advantage a turn
    traces of a group  --filters, verdicts---> which rollouts train
    trained tokens     --losses, aggregation-> one number to differentiate

Each is a plain function, chosen in the run file by a built-in name or as "module:function". The
loops call them and know none of them by name; `registry` finds, checks and binds them at load.
"""
