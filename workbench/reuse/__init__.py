"""How often a batch of rollouts may be used: the output head's gradient, a gate on it, and controls for the gate."""
