"""What the records of a run mean: statistics, objectives, summaries, comparisons, and the search for the highest rate.

Pure: no clock, no sockets. May import `loadtest.planning`, `loadtest.record`, `loadtest.target`, `loadtest.errors`.
"""
