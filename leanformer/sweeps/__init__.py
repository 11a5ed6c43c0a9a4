"""Sweeps: the runs of a grid, and their execution. This file imports nothing, so that `child` starts fast."""
