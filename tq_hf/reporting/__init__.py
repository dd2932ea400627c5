"""What a cache says of itself: tokens, bytes, ratios, and how they are shown."""
