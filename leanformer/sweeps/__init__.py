"""Sweeps: the grid of runs, and their execution on this machine or by SLURM. It imports nothing (`member_process`)."""
