"""Simulate the whole service in virtual time, with faults. Tests of the scheduler and `--model sim:` use it.

Pure, as the scheduler is. May import scheduler and what the scheduler may import.
"""
