"""Send a plan's requests to a server and record the answers: connections, wire formats, client processes, the clock.

May import `loadtest.planning`, `loadtest.record`, `loadtest.target`, `loadtest.errors`; not `loadtest.analysis`.
"""
