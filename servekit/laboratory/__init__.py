"""Compare ways of batching on one workload, in virtual time and with a real worker: `servekit lab`.

The modules for virtual time are pure, as the scheduler is. May import everything but the command line.
"""
