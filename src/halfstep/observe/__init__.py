"""What a run does, seen from outside: the part that all tools share which look at one.

``watch.py`` tells of modules, functions of torch and ops as they run, ``ops.py`` has the modes that see these, and
``names.py`` the names of modules and ops. ``counted.py`` counts ops, and ``notes.py`` keeps notes on tensors.
``samples.py`` takes samples of tensors, ``updates.py`` those of the numbers behind weights, before and after a step.
``reading.py`` brings numbers to the host without waiting, and ``row.py`` has the numbers of one tensor in one step.
What is concluded from them is said in ``findings`` and ``numerics``.
"""
