"""Compute predictions: embeddings, scores of pairs, labels of texts and images. Each item is computed once, completely.

May import loading and what stands below it.
"""
