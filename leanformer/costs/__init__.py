"""What a model and its programs cost: parameters, FLOPs, memory, kernels and communication. Numbers only."""
