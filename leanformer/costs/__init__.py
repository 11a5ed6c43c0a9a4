"""Costs of a model and its programs: parameters, FLOPs, memory, kernels and communication. Numbers only."""
