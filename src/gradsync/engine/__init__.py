"""One training step, in the order in which it happens: see docs/one_step.md."""
