"""Attacks of one tenant on the others.

Each module has attacks of one kind. An `Attack` is sent again and again by a process of its own, while a bystander of
another tenant is measured (`windows.py`). A `Scenario` is a sequence of its own, with its own claims. `catalogue.py`
names all of them: `python -m tests.torture attacks --only NAME`.
"""
