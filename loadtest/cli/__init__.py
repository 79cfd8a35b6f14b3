"""The command line: arguments, one module for each group of subcommands, and exit codes.

The top of loadtest. May import every other package.
"""
