"""Notebooks with smaller parameters, so that they run in minutes."""

import nbformat


PARAMETERS = {  # values for the cell with the tag "parameters", by notebook
    "budget": {
        "PROXIES": [],
        "SEEDS": 2,
        "TRAINING": {
            **{"batch_size": 8, "total_epochs": 0.0, "total_steps": 4, "log_every": 2, "optim.warmup_epochs": 0.0},
            **{"eval.every": 2, "eval.examples": 16, "eval.batch_size": 16},
        },
    },
    "conditioning": {
        **{"MOST_HEADS": 8, "DRAWS": 100, "HEADS": [2, 16], "SEEDS": 1},
        "TRAINING": {"total_steps": 20, "optim.warmup_epochs": 0.0, "probe.every": 10, "probe.examples": 8},
    },
    "language": {
        "TRAINING": {
            **{"total_steps": 6, "batch_size": 2, "log_every": 2, "optim.warmup_steps": 1, "model.width": 16},
            **{"model.head_dim": 4, "model.mlp_dim": 16, "model.max_length": 24, "eval.every": 3, "eval.examples": 4},
            **{"eval.batch_size": 4, "probe.every": 3, "probe.examples": 2},
        },
        **{"TOKENS": 12, "HEADS": (1, 16), "STEPS": 10},
    },
    "rank": {
        **{"TOKENS": 17, "WIDTH": 16, "HEADS": (1, 4), "FACTORS": [10.0, 1e3], "EXAMPLES": 16},
        **{"TASK_WIDTH": 8, "TASK_HEADS": (1, 4), "STEPS": 20, "SEEDS": 2},
    },
    "your_model": {"EXAMPLES": 2},
}


def read(path):
    """Return a notebook with a cell after the parameters, which sets all of them to smaller values."""
    notebook, values = nbformat.read(path, as_version=4), PARAMETERS[path.stem]
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    lines = [f"assert {name} is not None\n{name} = {value!r}" for name, value in values.items()]  # of an existing name
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    return notebook
