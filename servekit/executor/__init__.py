"""Run step plans in a worker process: start it, send plans, receive results, replace it when it is lost.

May import simulation, scheduler, protocol, config, errors.
"""
