"""The machine and the process: devices, other processes, signals, files. It knows no family, no task and no leaf of a
batch."""
