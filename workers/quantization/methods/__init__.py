"""Methods that round a matrix to few bits: to the nearest number (RTN), GPTQ and AWQ.

A method does not depend on files, models and layers: it is given a matrix, and statistics of the inputs that it is
multiplied by. May import nothing else of workers.
"""
