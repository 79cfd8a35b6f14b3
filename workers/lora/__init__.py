"""LoRA adapters: small matrices that are added to a model's own, other ones for each sequence of a step.

Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""
