"""Quantized weights: one type for all formats of quantized checkpoints, and rounding at load.

May import no other package of workers.
"""
