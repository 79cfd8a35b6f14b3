"""The C kernels, their ctypes bindings, and the module that compiles them at first use.

May import no other package of workers.
"""
