"""The ASGI layers around the routes: metrics, request log, host check, CORS, authentication. `stack` has their order.

May import request_body, responses, auth, and what the API may import; not routes.
"""
