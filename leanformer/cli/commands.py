"""Flags and words of leanformer's commands, by the name of the command's module."""

import dataclasses

from ml_collections import ConfigDict

from leanformer.cli.flags import CONFIG, CommandLine, Flag
from leanformer.config.rules import WHOLE_NUMBER


OPTIONAL_CONFIG = dataclasses.replace(CONFIG, required=False)
LAYOUTS = ("own", "timm", "huggingface")  # names of pretrained.layouts.LAYOUTS, and our own
TESTS = ("paired", "welch", "pooled")  # tests of a difference, of analysis.comparison.TESTS
SWEEP_FLAGS = (  # flags of a command that executes a sweep (sweeps.executor)
    Flag("workdir", "Folder that holds one folder per run.", required=True, writes=True),
    Flag(
        "cluster", "Run on this machine (local) or as a SLURM job array (slurm).", ("local", "slurm"), default="local"
    ),
    Flag(
        "parallel",
        "Runs in parallel: processes on this machine, or tasks of the SLURM array.",
        int,
        default=1,
        minimum=1,
    ),
    Flag("slurm", "KEY=VALUE: parameter of SLURM's sbatch.", default=(), many=True),
    Flag("minutes", "Time limit per run, in minutes.", int, default=60 * 24, minimum=1),
)

COMMANDS = {
    "train": CommandLine(
        (
            CONFIG,
            Flag(
                "workdir",
                "Folder of the run: metrics, checkpoints, plots.",
                required=True,
                writes=True,
            ),
            Flag("dry_run", "Print processes, devices and the starting step, without training.", bool, default=False),
        ),
        multi_process=True,
    ),
    "evaluate": CommandLine(
        (
            Flag("workdir", "Folder of the run.", required=True),
            Flag("step", "Checkpoint step to evaluate; the newest if neither --step nor --best is given.", int),
            Flag("best", "Evaluate the best checkpoint by validation score.", bool, default=False),
            Flag("split", "Split of the data; by default the run's evaluation split."),
            Flag("out", "Folder to write to; by default WORKDIR.", writes=True),
        ),
        multi_process=True,
    ),
    "predict": CommandLine(
        (
            Flag("workdir", "Folder of the run.", required=True),
            Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
            Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
            Flag("top", "Number of classes per file.", int, default=5, minimum=1),
            Flag("format", "Output format.", ("json", "csv"), default="json"),
            Flag("out", "File to write to instead of printing."),
        ),
        words="files or folders, and flags as --name=value",
    ),
    "generate": CommandLine(
        (
            Flag("workdir", "Folder of the run.", required=True),
            Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
            Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
            Flag("prompt", "Text to complete; empty for a new document."),
            Flag("prompts", "File with one prompt per line."),
            Flag("tokens", "Maximal number of generated tokens; by default up to the model's length.", int, minimum=1),
            Flag("temperature", "Sampling temperature; 0 takes the most likely token (greedy).", float, default=1.0),
            Flag("top_k", "Sample from this many of the most likely tokens.", int),
            Flag("top_p", "Sample from the most likely tokens that have this total probability.", float),
            Flag("seed", "Seed of the sampling.", int, default=0, minimum=0, maximum=WHOLE_NUMBER),
            Flag("out", "File to write the completions of --prompts to instead of printing them."),
        ),
    ),
    "embed": CommandLine(
        (
            OPTIONAL_CONFIG,
            Flag("workdir", "Folder of a run."),
            Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
            Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
            Flag("weights", "safetensors file with the parameters of --config."),
            Flag("tokenizer", "tokenizer.json or its folder; by default that of the run, or config.data.tokenizer."),
            Flag("texts", "File with one text per line.", required=True),
            Flag("out", "File .npy to write to instead of printing."),
        ),
    ),
    "probe": CommandLine(
        (
            OPTIONAL_CONFIG,
            Flag("workdir", "Folder of a run, to probe its checkpoints."),
            Flag("step", "Checkpoint step to probe; the newest if neither --step nor --all is given.", int),
            Flag("all", "Probe all saved checkpoints.", bool, default=False),
            Flag("weights", "safetensors file with the parameters of --config; alone, a file or folder of any model."),
            Flag(
                "num_heads", "Number of heads of --weights alone; by default that of its config.json.", int, minimum=1
            ),
            Flag("kv_heads", "Number of key and value heads of --weights alone; likewise.", int, minimum=1),
            Flag("head_dim", "Head dimension of --weights alone; likewise.", int, minimum=1),
            Flag("out", "Folder to write to; by default WORKDIR/probe, or ./probe without --workdir."),
            Flag(
                "measures",
                "Names of measures; by default config.probe.measures and the existing ones of W_Q, W_K, W_V, W_O.",
                list,
            ),
            Flag("examples", "Number of examples; by default config.probe.examples.", int),
            Flag("heads", "Numbers of heads to compare at initialisation.", list, default=()),
            Flag("seeds", "Initialisations per number of heads (--heads).", int, default=3),
            Flag("allow_nonfinite", "Also probe weights that contain NaN or infinity.", bool, default=False),
        ),
        multi_process=True,
    ),
    "cost": CommandLine(
        (
            CONFIG,
            Flag("against", "Config file to compare with.", ConfigDict),
            Flag("json", "Print one JSON object instead of a table.", bool, default=False),
        )
    ),
    "plan": CommandLine(
        (
            CONFIG,
            Flag("budget", "params:N or flops:N; a second one may be memory:BYTES.", required=True, many=True),
            Flag("slack", "Fraction of the budget that may be unused.", float, default=0.05, minimum=0, maximum=1),
            Flag("over", "model.KEY=NUMBER,...: sizes to enumerate for this key.", default=(), many=True),
            Flag("runs", "Folders of finished sweeps or runs to fit the response surface to.", list, default=()),
            Flag(
                "extrapolate", "Also rank architectures outside the sizes of the runs, separately.", bool, default=False
            ),
            Flag("proxies", "Number of proxy architectures to train first in OUT/proxies.", int, default=0, minimum=0),
            Flag("set", "KEY=VALUE: config key of the proxy runs, such as total_epochs=5.", default=(), many=True),
            Flag("seeds", "Seeds per proxy architecture.", int, default=2, minimum=1),
            Flag("metric", "NAME[:higher|lower] that the surface predicts; by default the score of the runs."),
            Flag("best", "Number of architectures to print and to write.", int, default=5, minimum=1),
            Flag("out", "Folder for config files of the printed architectures.", writes=True),
        )
    ),
    "sweep": CommandLine(
        (
            Flag("config", "Config files, each with an optional argument: FILE[:ARGUMENT],FILE.", list, default=()),
            Flag("over", "KEY=VALUE,VALUE,...: config key to vary, with its values.", default=(), many=True),
            Flag("set", "KEY=VALUE: config key with the same value in all runs.", default=(), many=True),
            Flag("seeds", "Number of seeds per point of the grid, counted from 0.", int, default=1, minimum=1),
            *SWEEP_FLAGS,
        )
    ),
    "prepare": CommandLine(
        (
            CONFIG,
            Flag("out", "Folder to write smaller images to (`shrink` only).", writes=True),
            Flag("short_side", "Short side of the smaller images in pixels (`shrink` only).", int, default=288),
        ),
        verbs=("check", "build", "shrink"),
    ),
    "convert": CommandLine(
        (
            OPTIONAL_CONFIG,
            Flag("from", "Layout of --weights.", LAYOUTS, default="own"),
            Flag("to", "Format to write.", (*LAYOUTS, "stablehlo"), default="own"),
            Flag("weights", "safetensors file, index of several files, folder with either, or run folder."),
            Flag(
                "step", "Checkpoint step of the run to convert; the newest if neither --step nor --best is given.", int
            ),
            Flag("best", "Convert the run's best checkpoint by validation score.", bool, default=False),
            Flag("out", "New folder to write to.", required=True, writes=True, new=True),
            Flag("max_shard_size", "Maximal size per file, such as 5GB or 500MiB; writes several files with an index."),
            Flag(
                "pad_heads", "Fill the width with heads and channels of zeros, for BERT and GPT-2.", bool, default=False
            ),
            Flag("reference", "safetensors file with input and logits of the original model, to compare with."),
        ),
        words="the folder of a run, and flags as --name=value",
        optional_words=True,
    ),
    "compare": CommandLine(
        (
            Flag("by", "Config keys that define a configuration; by default all keys that differ.", list, default=()),
            Flag("metric", "NAME[:higher|lower] of the last evaluation; by default the score of the runs."),
            Flag("margin", "Equivalence margin: largest difference to ignore, in units of the metric.", float),
            Flag("against", "Name of a configuration to compare all others with; by default all pairs are compared."),
            Flag(
                "test",
                "Test of a difference: paired by seed, Welch's (separate variances), or pooled (one variance).",
                TESTS,
                default="paired",
            ),
            Flag("out", "Folder to write to; by default compare/ in the compared folder.", writes=True),
        ),
        words="folders of runs or of sweeps",
    ),
    "keys": CommandLine(
        (OPTIONAL_CONFIG,), words="at most one section, such as model", optional_words=True, checked=False
    ),
}
