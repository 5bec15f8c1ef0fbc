"""Training on several ranks: averaging of gradients, messages between ranks, and checkpoints.

- ``ddp_sync.py``: the state of one optimizer, and a table of all messages: every rank sends the same number of them.
- ``ddp_hook.py``: the state of one DistributedDataParallel. ``flat_buckets.py``: averages before a step.
- ``joining.py``: masters at the end of a ``join``. ``checkpoint.py``: files that one rank writes for all ranks.
"""
