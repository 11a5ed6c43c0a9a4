"""Analysis of finished runs (comparison, Pareto fronts, response surface) and planning of architectures."""
