"""One run: from a checked config to its pieces, its steps, its state on disk and its records."""
