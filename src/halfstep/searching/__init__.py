"""Search: finds the smallest set of modules or ops that must stay in fp32, proven by the loss.

``units.py`` says what can be in fp32 on its own, ``scores.py`` ranks it, ``trials.py`` runs the step on copies of the
model, ``guard.py`` decides, and ``finder.py`` has the stages. ``search.py`` is the face, ``result.py`` the answer.
"""
