"""The measurements of benchmarks/gpu.py, one a process: `python benchmarks/gpu_rows.py FUNCTION JSON-ARGUMENTS`.

Each returns the figures of its row; the last line that is printed has them. With `tiny` everything is small, to try it.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

from leanformer import data
from leanformer.costs import hardware
from leanformer.errors import ConfigError, first_line
from leanformer.runtime import malloc
from leanformer.runtime import mesh as meshes
from leanformer.training import report
from leanformer.training.train_setup import TrainSetup


ROOT = Path(__file__).parents[1]
ANSWER = "RESULT "  # how the last line begins
REACHED = 0.85  # of quickstart, whose config promises 85 to 86 %
KILLED_AT, STEPS = 400, 1200  # of a run that is killed and goes on
JPEG, LINKS = (500, 375), 40  # pixels of ImageNet's typical file; names for each file, since its pixels do not matter
STAGES = {"num_heads": (2, 3), "head_dim": (8, 8), "image_size": 32}
BLOCK = {"width": 24, "depth": 2, "num_heads": 3, "head_dim": 8, "mlp_dim": 36, "image_size": 28}
TINY = {  # keys of `model`, by family
    "vit": BLOCK | {"patch_size": 7},
    "xcit": BLOCK | {"patch_size": 4, "class_heads": 2, "class_head_dim": 8},
    "tnt": BLOCK
    | {"patch_size": 14, "pixel_stride": 7, "inner_width": 8}
    | {"inner_heads": 2, "inner_head_dim": 8, "inner_mlp_dim": 16},
    "volo": STAGES
    | {"patch_size": 4, "width": (16, 24), "depth": (1, 1), "mlp_dim": (24, 36), "stem_width": 8}
    | {"class_heads": 2, "class_head_dim": 8},
    "davit": STAGES
    | {"channel_head_dim": (4, 4), "width": (8, 16), "depth": (1, 1), "mlp_dim": (16, 24), "window_size": 3},
}
TINY_BATCH = 8
TINY_RUN = {
    **{"total_epochs": 0.0, "batch_size": 32, "log_every": 2, "eval.every": 0, "probe.every": 10},
    **{"optim.warmup_epochs": 0.01, "model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32},
}


def build(config: str, batch: int, attention: str, tiny: bool) -> TrainSetup:
    """A config in bfloat16."""
    shrunk = TINY[config.partition("_")[0]] if tiny else {}
    return timing.build(config, TINY_BATCH if tiny else batch, "bfloat16", attention, **shrunk)


def machine(tiny: bool) -> dict[str, Any]:
    """The device, what runs on it, and its rate of plain bfloat16 products."""
    device, size = jax.devices()[0], 256 if tiny else 8192
    if device.platform == "cpu" and not tiny:
        raise ConfigError(
            "There is no GPU here: jax sees a CPU, and nothing was measured. --tiny tries the command on it."
        )
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    rate = 2 * size**3 / min(timing.seconds(product, x, x) for _ in range(10))
    peak, memory = hardware.peak_flops(device), (device.memory_stats() or {}).get("bytes_limit")
    return report.provenance() | {
        "platform": device.platform,
        "device": device.device_kind,
        "runtime": device.client.platform_version.replace("\n", " "),
        "memory GB": memory and round(memory / 1e9, 1),
        "products TFLOP/s": round(rate / 1e12, 1),
        "share of peak": peak and round(rate / peak, 3),
    }


def train(config: str, batch: int, attention: str, tiny: bool) -> dict[str, Any]:
    """A training step."""
    row = {"config": config} | timing.trained(build(config, batch, attention, tiny), 2 if tiny else timing.STEPS)
    return row if row["examples/s"] else row | {"note": "does not fit the memory"}


def probe(config: str, tiny: bool) -> dict[str, Any]:
    """The probe as it runs in training: the default measures of 16 images in all layers."""
    run = build(config, TINY_BATCH, "auto", tiny)
    weights, shapes = run.model.random_weights(0), run.abstract_batch()["image"].shape[1:]
    images = np.random.default_rng(0).integers(0, 256, (run.config.probe.examples, *shapes), dtype=np.uint8)
    batch = meshes.put_batch(run.mesh, {"image": images})
    begun = time.perf_counter()
    step = jax.jit(run.model.probe_step(run.task, run.config.probe.measures)).lower(weights, batch).compile()
    compiled = time.perf_counter() - begun
    seconds = statistics.median([timing.seconds(step, weights, batch) for _ in range(6)][1:])
    row = {"config": config, "device": jax.devices()[0].device_kind, "every": run.config.probe.every}
    return row | {"compile s": round(compiled, 1), "probe s": round(seconds, 4)}


def factorisations(tiny: bool) -> dict[str, Any]:
    """Milliseconds for the singular values of one layer's matrices: ours, and what else JAX has here."""
    import probe as contenders  # benchmarks/probe.py

    shape = (4, 17, 32) if tiny else (contenders.TOKENS, contenders.WIDTH)
    shape = shape if tiny else (16, *shape)
    x = jnp.asarray(contenders.gaussian(*shape))
    row = {"matrices": " x ".join(map(str, shape)), "device": jax.devices()[0].device_kind}
    for name, function in contenders.algorithms().items():
        if name in ("leanformer", "Gram", "QR, D&C", "QR, Jacobi", "QR, first, float32"):
            jitted = jax.jit(function)
            times = [timing.seconds(jitted, x) for _ in range(4)]
            row[f"{name} ms"] = round(1e3 * statistics.median(times[1:]), 2)
    return row


def pipeline(config: str, batch: int, folder: str, tiny: bool) -> dict[str, Any]:
    """JPEG files of real size, decoded and augmented by a worker a core: alone, and feeding the training step."""
    from input import write_images  # benchmarks/input.py

    classes = Path(folder) / "train" / "one"
    classes.mkdir(parents=True, exist_ok=True)
    for path in write_images(Path(folder), *JPEG):
        for i in range(LINKS):
            link = classes / f"{path.stem}_{i}.jpg"
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    run = build(config, batch, "auto", tiny)
    c = run.config
    c.data.update(workers=1 if tiny else os.cpu_count())
    size = {"image_size": c.model.image_size, "channels": c.model.channels, "num_classes": c.model.num_classes}
    source = data.open_images(f"folder:{folder}", "train", **size)
    row = {
        "config": config,
        "device": jax.devices()[0].device_kind,
        "attention": run.model.backend,
        "batch": c.batch_size,
    }
    turns = 4 * c.data.workers
    with contextlib.closing(run.stream(source, 0)) as batches:
        alone = _seconds(lambda _: next(batches), turns, None)
        step, key = run.compile_train_step(), run.run_key()
        for _ in range(c.data.workers * (c.data.prefetch + 1)):
            next(batches)  # what was made while the step was compiled
        fed = _seconds(lambda state: step(state, run.put(next(batches)), key)[0], turns, run.initial_state())
    rates = (round(turns * c.batch_size / seconds, 1) for seconds in (alone, fed))
    return row | {"workers": c.data.workers, **dict(zip(("read/s", "fed examples/s"), rates, strict=True))}


def _seconds(turn: Callable[[Any], Any], turns: int, state: Any) -> float:
    """Of so many turns after a few, each of which takes what the one before it gave."""
    for i in range(timing.WARM_UP + turns):
        if i == timing.WARM_UP:
            jax.block_until_ready(state)
            begun = time.perf_counter()
        state = turn(state)
    jax.block_until_ready(state)
    return time.perf_counter() - begun


def timm(batch: int, compiled: bool, tiny: bool) -> dict[str, Any]:
    """The same training step of timm's ViT-B/16 as it is, in PyTorch: autocast to bfloat16, fused AdamW."""
    try:
        import timm.models.vision_transformer as vit
        import torch
    except ImportError as error:
        return {"status": "not here", "note": f"{error}. pip install torch torchvision timm"}
    if not (tiny or torch.cuda.is_available()):
        return {"status": "not here", "note": "PyTorch sees no GPU"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = {"img_size": 28, "patch_size": 7, "embed_dim": 24, "depth": 2, "num_heads": 3} if tiny else {}
    batch, size = (TINY_BATCH, 28) if tiny else (batch, 224)
    with device:
        model = vit.VisionTransformer(drop_path_rate=0.1, **small)
        images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
        labels = torch.randint(0, 1000, (batch,))
    split = {True: [], False: []}
    for parameter in model.parameters():
        split[parameter.ndim > 1].append(parameter)
    groups = [{"params": split[True], "weight_decay": 0.3}, {"params": split[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        mixed, part = (images.float() / 255 - 0.5) / 0.5, 0.7
        targets = torch.nn.functional.one_hot(labels, 1000) * 0.9 + 0.1 / 1000
        mixed, targets = (part * x + (1 - part) * x.flip(0) for x in (mixed, targets))
        with torch.autocast(device.type, torch.bfloat16):
            logits = forward(mixed)
        (-(targets * logits.float().log_softmax(-1)).sum(-1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def finished() -> float:
        torch.cuda.synchronize() if device.type == "cuda" else None
        return time.perf_counter()

    begun, steps = time.perf_counter(), 2 if tiny else timing.STEPS
    step()
    first = finished() - begun
    for _ in range(timing.WARM_UP):
        step()
    begun = finished()
    for _ in range(steps):
        step()
    rate = steps * batch / (finished() - begun)
    name, peak = "cpu", None
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(), round(torch.cuda.max_memory_allocated() / 1e9, 2)
    row = {"program": "torch.compile" if compiled else "eager", "device": name, "torch": torch.__version__}
    return row | {"batch": batch, "first step s": round(first, 1), "examples/s": round(rate, 1), "peak GB": peak}


def quickstart(folder: str, tiny: bool) -> dict[str, Any]:
    """The first command of the README, from its start to its accuracy."""
    small = TINY_RUN | {"total_steps": 20} if tiny else {}
    begun = time.perf_counter()
    status = _training(folder, small).wait()
    wall = time.perf_counter() - begun
    if status:
        raise RuntimeError(f"training ended with status {status}")
    summary = json.loads((Path(folder) / "summary.json").read_text())
    facts = json.loads((Path(folder) / "config.json").read_text())
    top1, seconds = summary["final"]["top1"], summary["seconds"]
    row = {"device": facts["devices"][0], "top1": top1, "reached": top1 >= REACHED, "wall s": round(wall, 1)}
    row |= {f"{name} s": seconds.get(name) for name in ("start-up", "compile", "steps", "evaluation", "probe")}
    return row | {"probe share": summary["probe_share"], "examples/s": summary["examples_per_s"]}


def resume(folder: str, tiny: bool) -> dict[str, Any]:
    """A run with deterministic=True, killed on its way and started again, against the same run left alone."""
    environ = dict(os.environ)
    sys.path.insert(0, str(ROOT / "tests" / "stress"))
    import kills  # which compares on the CPU

    jax.config.update("jax_platforms", "cpu")
    total, at = (30, 10) if tiny else (STEPS, KILLED_AT)
    options = (TINY_RUN if tiny else {"total_epochs": 0.0, "log_every": 10}) | {"total_steps": total}
    options |= {"deterministic": True, "dtype": "bfloat16", "checkpoint.every": at // 2}
    left_alone, killed = (str(Path(folder) / name) for name in ("left_alone", "killed"))
    statuses = [_training(left_alone, options, environ).wait()]
    process = _training(killed, options, environ)
    while process.poll() is None and _last_step(killed) < at:
        time.sleep(0.002)
    process.kill()
    if process.wait() == 0:
        raise RuntimeError(f"The run had done its {total} steps before it could be killed.")
    stopped = _last_step(killed)
    statuses.append(_training(killed, options, environ).wait())
    if any(statuses):
        raise RuntimeError(f"training ended with statuses {statuses}")
    facts = json.loads((Path(killed) / "config.json").read_text())
    differences = kills.differences(*(kills.final("image", Path(workdir)) for workdir in (killed, left_alone)))
    row = {"device": facts["devices"][0], "steps": total, "killed after step": stopped}
    return row | {"same bits": not differences, "differences": ", ".join(differences) or None}


def _training(workdir: str, options: dict[str, Any], environ: dict[str, str] | None = None) -> subprocess.Popen:
    words = [sys.executable, "-m", "leanformer.train", "--config=configs/quickstart.py", f"--workdir={workdir}"]
    words += [f"--config.{key}={value}" for key, value in options.items()]
    return subprocess.Popen(words, cwd=ROOT, env=environ)


def _last_step(workdir: str) -> int:
    return max((record["step"] for record in report.read_records(Path(workdir) / "metrics.jsonl")), default=0)


def _end_with(parent: int) -> None:
    """Ends this process and its children when its parent is gone, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


FUNCTIONS = {f.__name__: f for f in (machine, train, probe, factorisations, pipeline, timm, quickstart, resume)}


def main() -> int:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    malloc.keep_freed()  # as every command does
    try:
        found = FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))
    except Exception as error:  # said in one line; JAX ends its traces with others
        traceback.print_exc()
        found = {"status": "failed", "note": f"{type(error).__name__}: {first_line(error)}"}
    print(ANSWER + json.dumps(found), flush=True)
    return int(found.get("status") == "failed")


if __name__ == "__main__":
    sys.exit(main())
