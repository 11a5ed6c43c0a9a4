"""PyTorch's side of a benchmark: a step for each line that comes in, beside ours (`timing.Worker`).

For an environment of its own, so it imports nothing of leanformer. A script's one argument is JSON. It answers in JSON,
a line each: first a description, then seconds.
"""

import json
import os
import sys
import time

import torch


def serve(make, library):
    """Args: make: from what the argument holds, by keyword, to a step with its `model`. library: a module."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    step = make(**json.loads(sys.argv[1]))
    for _ in range(2):  # which warm up
        step()
    versions = f"PyTorch {torch.__version__}, {library.__name__} {library.__version__}"
    parameters = sum(p.numel() for p in step.model.parameters())
    print(json.dumps({"versions": versions, "parameters": parameters}), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        step()
        print(json.dumps(time.perf_counter() - begun), flush=True)
