"""Weights of few bits: the values that every format of quantized checkpoints is read into.

May import nothing of workers.
"""
