"""The benchmark: questions, answers in turn, figures, report."""
