"""Exports of trained models: folders that transformers, timm or JAX alone load, and their checks."""
