"""Exact solvers of games."""
