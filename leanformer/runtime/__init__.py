"""Devices, processes, time and files. This package is independent of models, tasks and batch contents."""
