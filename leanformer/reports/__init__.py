"""Reports: pages of text, plots and tables. Only commands import this package."""
