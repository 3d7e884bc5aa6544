"""Attack ``optimize`` with random graphs of real norms with traps, judged in float64 without the code under test.

The graphs are based on a list of causes of errors, not on the recognizer. ``python -m benchmarks.attack --count 1000
--seed 0``.
"""
