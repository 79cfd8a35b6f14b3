"""Formats of quantized checkpoints: how each packs a matrix, and how it is read into a QuantizedTensor.

A format does not depend on files, models and layers: it is given tensors by name. registry.py says which format a
config.json describes. May import workers.quantization.quantized_tensor, workers.quantization.methods.grid and
servekit.errors.
"""
