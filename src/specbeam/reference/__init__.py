"""Models written out in NumPy, to be read and to check the others against."""
