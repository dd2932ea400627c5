"""A cache as a file: written by `saving`, read by `loading`."""
