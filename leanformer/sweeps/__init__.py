"""Sweeps: the grid of runs, and their execution on this machine or by SLURM.

This file imports nothing, so that `child` starts fast.
"""
