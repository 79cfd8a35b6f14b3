"""Serve one model: LLMEngine admits requests, EngineCore executes steps, OutputProcessor fills the clients' queues.

May import executor, sandbox, observability and everything below them; not the API.
"""
