"""Costs of a model: parameters, FLOPs, memory, and data sheets of devices."""
