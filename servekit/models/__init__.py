"""Several models in one server: the file that lists them, their names, and which of them are loaded.

May import engine and what that may import. `model_file`, `names` and `residency` are pure.
"""
