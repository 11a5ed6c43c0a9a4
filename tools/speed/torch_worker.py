"""PyTorch's side of a benchmark: one training step per input line, as `timing.Worker` expects.

It runs in a separate environment, so it imports nothing from leanformer. A script's only argument is JSON, for the step
and with `device` (default: cpu), `dtype` (of autocast, default: float32) and `compiled`. It prints JSON lines: first a
description, then seconds.
"""

import json
import os
import sys
import time

import torch


def serve(make, library):
    """Run one step per input line, and print its seconds.

    Args:
        make: function of the JSON argument's entries, by keyword, that returns a step with its `model`.
        library: module of the model's library.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    arguments = json.loads(sys.argv[1])
    device, dtype = arguments.pop("device", "cpu"), arguments.pop("dtype", "float32")
    compiled = arguments.pop("compiled", False)
    torch.set_default_device(device)
    step = make(**arguments)
    parameters = sum(p.numel() for p in step.model.parameters())
    if compiled:
        step.model = torch.compile(step.model)

    def run():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            step()
        if device != "cpu":
            torch.accelerator.synchronize()

    for _ in range(5 if device != "cpu" else 2):  # warm-up
        run()
    versions = f"PyTorch {torch.__version__}, {library.__name__} {library.__version__}"
    print(json.dumps({"versions": versions, "parameters": parameters}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(json.dumps(time.perf_counter() - start), flush=True)
