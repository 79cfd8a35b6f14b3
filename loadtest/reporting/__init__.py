"""Show summaries to people: Markdown tables, the HTML page and its charts.

Pure but for writing the page to a file. May import `loadtest.analysis` and what that may import.
"""
