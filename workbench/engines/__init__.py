"""The same credit inside training engines that go beyond one process; each needs its own extra, and no other part does.

`trl` is a GRPOTrainer with a Method of this package in it, `verl` registers with verl's trainer. docs/engines.md.
"""
