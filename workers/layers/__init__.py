"""Faster equivalents of transformers' layers, for CPUs (C) and GPUs (Triton).

May import attention, kv_cache, csrc, parallel, quantization.
"""
