"""One optimizer: its backward passes, its step, taken or skipped, and its messages between ranks.

- ``prepare.py``: brings models and optimizers to a policy, for every face.
- ``backward.py``: the passes between two steps; ``WindowState`` has the picture. ``scaled_backward.py``: the block of
  ``scale_loss``. A pass belongs to the parameters that it reaches, so a block also opens the windows of optimizers that
  it does not name.
- ``attached.py``: the step. ``dynamic_class.py``: the subclass whose ``step`` and ``zero_grad`` call it.
- ``replaced.py``: refuses a step after parameters of the model were replaced. ``scaling_checks.py``: warns of gradients
  that were not scaled, scaled twice, or clipped too early.
- ``ranks/``: averages and messages between processes; ``ddp_sync.py`` has a table of all messages.
"""
