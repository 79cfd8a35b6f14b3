"""Choose the replica that computes a sequence: a pure function of the replicas' workload managers.

No clock, no I/O, no randomness, no asyncio, no logging. May import scheduler and what the scheduler may import.
"""
