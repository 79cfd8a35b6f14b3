"""Serve models that run on another server, by the same API: requests to it, retries, and a circuit breaker.

May import engine and what that may import. `settings`, `circuit_breaker`, `tenant_breakers`, `retry_budget`, `failure`,
`openai_request`, `openai_stream`, `prediction_format` and `kserve_format` are pure. Needs the packages of the `remote`
extra.
"""
