"""Let workers join that were started elsewhere: by hand, by systemd, in a pod, on another machine.

The server listens (`listener.py`), and each worker has an agent that connects (`agent.py`). May import executor, aio,
protocol, config, errors.
"""
