"""Training of one run: setup, steps, checkpoints and records."""
