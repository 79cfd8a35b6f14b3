"""Convert a GGUF file to a model's directory: its configuration, its tokenizer, and an index of its tensors.

The file may come from an attacker. Its header is read in Python, and every count is checked against the remaining
length of the file. May import servekit.protocol and servekit.errors.
"""
