"""How many rollouts a task gets, and what a few rollouts are compared with: one file a method, pure functions."""
