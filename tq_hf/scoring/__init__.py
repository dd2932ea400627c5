"""Texts scored through a packed cache: the modes, and the caches that take a text in."""
