"""Ink: pages, charts and tables of what was found elsewhere. Commands alone import them."""
