"""The HTTP routes, one module for each API or topic. Each module has its ENDPOINTS.

May import request_body, responses, schemas, auth, and what the API may import; not middleware.
"""
