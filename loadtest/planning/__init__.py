"""What a run will send, and when: arrivals, workloads, traces and the plan made of them.

Pure: no clock, no sockets. Everything is drawn from a seed. May import `loadtest.errors` only.
"""
