"""The algorithm: rotations, Lloyd-Max codebooks, the sketch of a residual, and the balance of key channels before them."""
