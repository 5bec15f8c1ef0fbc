"""The training step of one optimizer: its backward passes, the step or its skip, and its messages between ranks.

- ``prepare.py``: prepares models and optimizers for a policy; every face calls it.
- ``backward.py``: the passes between two steps; the docstring of ``WindowState`` draws the states.
  ``scaled_backward.py``: the block of ``scale_loss``. A pass writes gradients of every parameter that it reaches, so a
  block also opens the windows of optimizers that it does not name.
- ``attached.py``: the step. ``dynamic_class.py``: the subclass whose ``step`` and ``zero_grad`` call it.
  ``closure.py``: closures of a step.
- ``replaced.py``: refuses a step after user code replaced parameters of the model. ``scaling_checks.py`` and
  ``diagnosis.py``: warn of gradients that were not scaled, scaled twice, or clipped before they were unscaled.
- ``ranks/``: averages and messages between processes; ``ddp_sync.py`` has a table of all messages.
"""
