"""Serve models that run on another server, by the same API: requests to it, retries, and a circuit breaker.

May import engine and what that may import. `settings`, `circuit_breaker`, `retry_budget`, `failure`,
`tenant_breakers`, `openai_request`, `openai_stream` and `kserve_format` are pure. Needs the packages of the `remote`
extra.
"""
