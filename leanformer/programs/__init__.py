"""Compiled programs: memory, kernels and collectives, for devices that need not be attached. Nothing is run."""
