"""Measurements of queue.py: each function runs in a process of its own and returns a row, or several."""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer import cli, data
from leanformer.costs import devices
from leanformer.errors import ConfigError, first_line
from leanformer.layers.masks import Mask
from leanformer.runtime import mesh as meshes
from leanformer.training import run_files, train_setup
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.train_setup import Setup
from tools import bits
from tools.gpu import attention as check
from tools.speed import peers, timing


JPEG, LINKS = (500, 375), 40  # typical size of ImageNet files; links to each file, since the content does not matter
STAGES = {"num_heads": (2, 3), "head_dim": (8, 8), "image_size": 32}
BLOCK = {"width": 24, "depth": 2, "num_heads": 3, "head_dim": 8, "mlp_dim": 36, "image_size": 28}
TEXT = {name: size for name, size in BLOCK.items() if name != "image_size"} | {"vocabulary": 301, "max_length": 64}
TINY = {  # keys of `model`, by architecture
    "vit": BLOCK | {"patch_size": 7},
    "deit": BLOCK | {"patch_size": 7},
    "xcit": BLOCK | {"patch_size": 4, "class_heads": 2, "class_head_dim": 8},
    "tnt": BLOCK
    | {"patch_size": 14, "pixel_stride": 7, "inner_width": 8}
    | {"inner_heads": 2, "inner_head_dim": 8, "inner_mlp_dim": 16},
    "volo": STAGES
    | {"patch_size": 4, "width": (16, 24), "depth": (1, 1), "mlp_dim": (24, 36), "stem_width": 8}
    | {"class_heads": 2, "class_head_dim": 8},
    "davit": STAGES
    | {"channel_head_dim": (4, 4), "width": (8, 16), "depth": (1, 1), "mlp_dim": (16, 24), "window_size": 3},
    **dict.fromkeys(("gpt2", "bert"), TEXT),
    "nystromformer": TEXT | {"landmarks": 8, "convolution": 3},
}
FULL, CAUSAL, LENGTHS = Mask(), Mask(causal=True), Mask(lengths=True)
CALLS = {  # attention of the models: T, S, N, H and mask
    "ViT 7x16": (198, 198, 16, 64, LENGTHS),
    "DaViT windows": (50, 50, 8, 32, LENGTHS),
    "class token": (1, 198, 16, 64, LENGTHS),
    "GPT-2 4x16": (64, 64, 16, 32, CAUSAL),
    "GPT 2048 tokens": (2048, 2048, 8, 128, CAUSAL),
    "BERT 10x24": (128, 128, 24, 32, FULL),
}
SINGLE, LIMIT = 1e-5, check.largest_error(jnp.bfloat16)  # largest errors of attention in float32 and bfloat16
LEAN = "vit_b_7x16"
AGREE = 1e-3  # largest relative difference of the loss of ten steps between devices, with float32 matmuls
WATCH = 1e-4  # largest relative difference of a watched measure between devices, in float32; 7.4e-6 on an H200


def build(config: str, batch: int, attention: str, tiny: bool, dtype: str = "bfloat16", **model: Any) -> Setup:
    """Return the training setup of a config."""
    sizes = TINY[config.partition("_")[0]] if tiny else {}
    return timing.build(config, 8 if tiny else batch, dtype, attention, **sizes, **model)


def machine(tiny: bool) -> dict[str, Any]:
    """Describe the device and its throughput of plain bfloat16 matmuls."""
    device, size = jax.devices()[0], 256 if tiny else 8192
    if device.platform == "cpu" and not tiny:
        raise ConfigError("No GPU was found: JAX runs on a CPU. Use --tiny to try the command on it.")
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul)
    rate = 2 * size**3 / min(timing.time_call(matmul, x, x) for _ in range(10))
    peak = devices.peak_flops(device)
    facts = {"device": device.device_kind, "runtime": device.client.platform_version.replace("\n", " ")}
    facts |= {"products TFLOP/s": round(rate / 1e12, 1), "share of peak": peak and round(rate / peak, 3), "tiny": tiny}
    return run_files.provenance() | facts


def attention(dtype: str, tiny: bool) -> list[dict[str, Any]]:
    """Compare every attention backend with the float32 reference, forward and backward."""
    rows, precise = [], dtype == "float32"
    if precise:  # XLA's kernels would use TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    for name, (queries, keys, heads, width, mask) in CALLS.items():
        if tiny:
            queries, keys, heads, width = min(queries, 6), min(keys, 6), 2, 8
        shapes = [(tokens, heads, width) for tokens in (queries, keys, keys)]
        call = check.Call(*shapes, jnp.dtype(dtype), mask, None)
        row: dict[str, Any] = {"attention": name, "dtype": dtype, "limit": SINGLE if precise else LIMIT}
        for backend in ("xla", "cudnn"):
            try:
                row[backend] = float(f"{check.relative_error(call, backend):.2g}")
            except check.FAILURES as error:
                row[backend] = f"refused: {first_line(error)[:80].rstrip('.')}"
        rows.append(row)
    return rows


def agree(config: str, tiny: bool) -> dict[str, Any]:
    """Train ten steps of a tiny model on the device and on the CPU: same weights, batch and random numbers."""
    jax.config.update("jax_default_matmul_precision", "highest")
    losses = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            run = build(config, 8, "auto", True, "float32")
            run = train_setup.set_up_training(run.config, examples=1024, mesh=meshes.make_mesh(devices=[device]))
            state, batch, step = run.initial_state(), timing.make_batch(run), run.compile_train_step()
            values = []
            for _ in range(10):
                state, metrics = step(state, batch, run.run_key())
                values.append(float(metrics["last_loss"]))
            losses.append(values)
    difference = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    row = {"config": config, "loss": losses[0][-1], "CPU's": losses[1][-1], "largest difference": f"{difference:.1e}"}
    return row | {"limit": AGREE, "agrees": difference <= AGREE}


def study(module: str, words: Sequence[str], tiny: bool) -> dict[str, Any]:
    """Run a command of the study, which writes its own rows. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", f"study.heads.{module}", *words], check=True)
    return {"module": module}


def train(config: str, batch: int, tiny: bool, **model: Any) -> dict[str, Any]:
    """Measure a training step."""
    run = build(config, batch, "auto", tiny, **model)
    row = {"config": config, **model} | timing.measure_training(run, 2 if tiny else timing.STEPS)
    if row["examples/s"] is None:
        return row | {"note": "out of memory"}
    length = run.config.model.get("max_length")
    return row | {"tokens/s": length and round(length * row["examples/s"])}


def peer(config: str, batch: int, python: str, tiny: bool) -> dict[str, Any]:
    """Measure PyTorch, eager and compiled, and ours after it, in bfloat16."""
    sizes = (peers.TINY.get(config) or (peers.TEXT if peers.is_text(config) else peers.TINY[LEAN])) if tiny else {}
    c, batch = timing.build(config, 2, "bfloat16", "xla", **sizes).config, 2 if tiny else batch
    device = "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
    row: dict[str, Any] = {"config": config, "batch": batch}
    for name, compiled in (("eager/s", False), ("compile/s", True)):
        task = peers.describe(c, batch) | {"device": device, "dtype": "bfloat16", "compiled": compiled}
        worker = timing.Worker(python, str(peers.script(config)), json.dumps(task))
        seconds = [worker.step() for _ in range(2 if tiny else 20)]
        worker.close()
        row[name] = round(batch / statistics.median(seconds), 1)
    run = timing.build(config, batch, "bfloat16", "auto", **sizes)
    rate = timing.measure_training(run, 2 if tiny else timing.STEPS)["examples/s"]
    times = {f"times {name[:-2]}": rate and round(rate / row[name], 2) for name in ("eager/s", "compile/s")}
    return row | {"ours/s": rate} | times


KINDS = {  # of the kernels of a step, by patterns of their names and operations; the first that is found
    "attention": "fmha|flash|mha|sdpa",
    "matmul": "gemm|nvjet|cutlass|cublas|dot|conv",
    "copy": "memcpy|memset|copy|transpose",
    "reduction": "reduce|norm|softmax",
}
OTHER = "elementwise"


def profile(config: str, batch: int, tiny: bool) -> dict[str, Any]:
    """Measure the milliseconds per step of each kind of kernel, and their number, from a trace of five steps."""
    run = build(config, batch, "auto", tiny)
    step, state, data, key = run.compile_train_step(), run.initial_state(), timing.make_batch(run), run.run_key()
    steps = 5
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2):
            start = time.perf_counter()
            with jax.profiler.trace(folder) if turn else contextlib.nullcontext():
                for _ in range(steps):
                    state, _ = step(state, data, key)
                jax.block_until_ready(state)
            seconds = time.perf_counter() - start
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = [plane for plane in jax.profiler.ProfileData.from_file(str(path)).planes if plane.name.startswith("/")]
        gpu = [plane for plane in planes if "GPU" in plane.name]
        kinds, count = dict.fromkeys((*KINDS, OTHER), 0.0), 0
        for event in (e for plane in gpu or planes for line in plane.lines for e in line.events):
            operation = dict(event.stats).get("hlo_op")
            if operation is None:  # no kernel
                continue
            text = f"{event.name} {operation}".lower()
            kind = next((name for name, pattern in KINDS.items() if re.search(pattern, text)), OTHER)
            kinds[kind] += event.duration_ns / 1e6 / steps
            count += 1
    row = {"config": config, "batch": run.config.batch_size, "step ms": round(1000 * seconds / steps, 2)}
    return row | {name: round(x, 2) for name, x in kinds.items()} | {"kernels": round(count / steps)}


def resume(deterministic: bool, tiny: bool) -> dict[str, Any]:
    """Compare the weights of a run of 20 steps with those of a run that resumes from its step 10, bit for bit."""
    spawned = multiprocessing.get_context("spawn")  # new processes, which choose their kernels anew
    with tempfile.TemporaryDirectory() as folder:
        arguments, weights = (folder, deterministic, tiny), []
        for _ in range(2):
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as process:
                weights.append(process.submit(_train_small, *arguments).result())
            shutil.rmtree(Path(folder) / "checkpoints" / "20")
            (Path(folder) / "summary.json").unlink()
    same = [np.array_equal(x, weights[1][name]) for name, x in weights[0].items()]
    return {"deterministic": deterministic, "arrays": len(same), "equal arrays": sum(same)}


def _train_small(folder: str, deterministic: bool, tiny: bool) -> dict[str, np.ndarray]:
    """Train or resume a small ViT, and return its weights."""
    from leanformer import train as command

    cli.require_deterministic(deterministic)
    c = bits.make_small("vit")
    c.update(dtype="float32" if tiny else "bfloat16", deterministic=deterministic)
    c.checkpoint.update(every=10, keep=3)
    command.train(c, Path(folder))
    with Checkpoints(Path(folder) / "checkpoints") as saved:
        return {name: np.asarray(x, np.float32) for name, x in saved.restore_weights().tensors.items()}


def probe(config: str, tiny: bool) -> dict[str, Any]:
    """Measure the conditioning probe as in training: the default measures of 16 images in all layers."""
    run = build(config, 8, "auto", tiny)
    weights, shape = run.model.random_weights(0), run.batch["image"].shape[1:]
    images = np.random.default_rng(0).integers(0, 256, (run.config.probe.examples, *shape), dtype=np.uint8)
    batch, start = meshes.put_batch(run.model.mesh, {"image": images}), time.perf_counter()
    probe_step = run.model.probe_step(run.task.objective, run.config.probe.measures)
    step = jax.jit(probe_step).lower(weights, batch).compile()
    compile_s = time.perf_counter() - start
    seconds = statistics.median([timing.time_call(step, weights, batch) for _ in range(6)][1:])
    return {"config": config, "compile s": round(compile_s, 1), "probe s": round(seconds, 4)}


def pipeline(config: str, batch: int, folder: str, tiny: bool) -> dict[str, Any]:
    """Measure JPEG files of typical size, decoded and augmented by one worker per core, without and with training."""
    from tools.speed.input import write_images

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
    source, batch_count = data.open_images(f"folder:{folder}", "train", **size), 4 * c.data.workers
    with contextlib.closing(run.batches(source, 0)) as batches:
        read_s = _time_calls(lambda _: next(batches), batch_count, None)
        step, key = run.compile_train_step(), run.run_key()
        for _ in range(c.data.workers * (c.data.prefetch + 1)):
            next(batches)  # prefetched while the step was compiled
        train_s = _time_calls(
            lambda state: step(state, run.put(next(batches)), key)[0], batch_count, run.initial_state()
        )
    rates = [round(batch_count * c.batch_size / seconds, 1) for seconds in (read_s, train_s)]
    return {"config": config, "batch": c.batch_size, "workers": c.data.workers, "read/s": rates[0], "fed/s": rates[1]}


def _time_calls(function: Callable[[Any], Any], calls: int, state: Any) -> float:
    """Return the seconds of `calls` calls after a warm-up; each call gets the result of the one before."""
    for i in range(timing.WARM_UP + calls):
        if i == timing.WARM_UP:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state = function(state)
    jax.block_until_ready(state)
    return time.perf_counter() - start


def watch(model: str, tiny: bool) -> dict[str, Any]:
    """Compare `leanformer.watch` on a PyTorch model on the GPU and on the CPU, in float32, and time its calls."""
    import torch

    import leanformer

    network, inputs = make_watched(model, tiny)
    values: list[dict[str, float]] = []
    row: dict[str, Any] = {"model": model}
    for device in ("cpu", "cuda" if torch.cuda.is_available() else "cpu"):
        network.eval().to(device)
        batch = inputs.to(device)

        def call(batch: Any = batch, device: str = device) -> float:
            start = time.perf_counter()
            with torch.no_grad():
                network(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        plain = min(call() for _ in range(1 if tiny else 4))
        measured = []
        for _ in range(3):
            with leanformer.watch(network) as watched:
                measured.append(call())
        values.append(watched.record())
        row |= {f"{device} plain s": round(plain, 4), f"{device} times": round(min(measured) / plain, 2)}
    cpu, gpu = values
    difference = float(np.max([abs(gpu[key] - x) / abs(x) for key, x in cpu.items()]))  # NaN if one is
    return row | {"largest difference": f"{difference:.1e}", "limit": WATCH, "agrees": difference <= WATCH}


def make_watched(model: str, tiny: bool) -> tuple[Any, Any]:
    """Return a PyTorch model with random weights, and a batch for it."""
    import torch

    torch.manual_seed(0)
    if model == "vit_small_patch16_224":
        import timm

        sizes = {"depth": 2, "embed_dim": 24, "num_heads": 3} if tiny else {}
        return timm.create_model(model, **sizes), torch.randn(8, 3, 224, 224)
    import transformers

    if model == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0}
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes if tiny else {}))
    else:  # the shape of Llama 3.2 1B
        sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        sizes |= {"intermediate_size": 8192, "vocab_size": 128_256}
        small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"intermediate_size": 32, "vocab_size": 101}
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small if tiny else sizes))
    return network, torch.randint(0, network.config.vocab_size, (4, 128))


FUNCTIONS = {
    f.__name__: f for f in (machine, attention, agree, resume, watch, train, peer, profile, probe, pipeline, study)
}
