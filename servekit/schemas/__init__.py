"""Request and response bodies, one module for each door, and their way to a GenerationRequest."""
