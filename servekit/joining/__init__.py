"""Let workers join that the server did not start: by hand, by systemd, in a pod, on another machine.

The server listens (`listener.py`), and each worker has an agent that connects (`agent.py`). May import executor, aio,
protocol, config, errors.
"""
