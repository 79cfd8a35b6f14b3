"""Make a model's directory of a GGUF file: its configuration, its tokenizer, and an index of its tensors.

The file may come from an attacker. Its header is read in Python, with every count checked against what is left of the
file. May import servekit.protocol and servekit.errors.
"""
