"""What a packed cache costs in quality, measured on real models. Run from a checkout; not part of the installed package."""
