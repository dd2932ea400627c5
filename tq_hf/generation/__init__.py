"""A generation token by token, the turns of a chat, and two caches compared on the same text."""
