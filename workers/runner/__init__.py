"""Execute step plans on a device: the real runner, the simulated one, CUDA graphs, memory profiling, the profiler.

May import speculation, loading, sampling, batch, layers, attention, kv_cache, device, parallel, servekit.protocol,
servekit.errors, and (the simulated runner only) servekit.simulation.
"""
