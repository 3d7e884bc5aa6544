"""An attack on ``optimize``: random graphs of real norms with traps, judged in float64 without the code under test.

Written from a list of causes and not from the recogniser. ``python -m benchmarks.attack --count 1000 --seed 0``.
"""
