"""Costs of a model: parameters and FLOPs, data sheets of devices, settings that need less memory. Numbers only."""
