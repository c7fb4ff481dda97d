"""Auxiliary token losses from a teacher's log-probs: one file a method, pure tensor functions."""
