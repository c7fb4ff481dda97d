"""A notebook-first workbench for credit signals in agentic reinforcement learning."""

__version__ = "0.1.0"
