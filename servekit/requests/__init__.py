"""A request of each kind, in one form for all HTTP APIs: for texts, for predictions, and for tensors. Pure.

May import protocol and errors. A prediction is what a model computes of an input at once: an embedding, a score, or
labels. How long a request will take is predicted, too: that is a latency prediction (servekit/latency/).
"""
