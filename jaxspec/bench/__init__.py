"""The benchmark: questions, runs, metrics, reports, and dry runs."""
