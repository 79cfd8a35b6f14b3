"""Models that run on another server, behind the same API: requests to it, retries, and a circuit breaker.

May import engine and what that may import. `settings`, `circuit_breaker`, `retry_budget`, `openai_request` and
`openai_stream` are pure. Needs the packages of the `remote` extra.
"""
