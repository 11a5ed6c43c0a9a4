"""Analysis of finished runs: comparison with intervals, Pareto fronts, response surface; and planning of shapes."""
