"""Choose tokens from logits: sampling, penalties, banned tokens, grammars, logprobs.

May import batch, device, grammar, servekit.protocol.
"""
