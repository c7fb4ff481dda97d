"""Sweeps: a study is a grid of parameters over one notebook, and every cell of it is an ordinary run."""
