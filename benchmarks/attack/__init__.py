"""Test ``optimize`` with random graphs: norms, and norms with traps.

The judge works in float64 and does not use the tested code.

The generators follow a list of possible causes of errors, and were written independently of the recognition code.
``python -m benchmarks.attack --count 1000 --seed 0``.
"""
