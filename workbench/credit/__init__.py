"""How an episode's outcome is shared out over its turns and tokens: one file a method, pure tensor functions."""
