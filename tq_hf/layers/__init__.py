"""A cache's layers: which class each of them gets, what it holds, and the handle that it gives to attention."""
