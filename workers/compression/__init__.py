"""Write a quantized checkpoint of an unquantized one: what `servekit quantize` runs, in a process of its own.

May import loading, quantization, servekit.protocol, servekit.errors.
"""
