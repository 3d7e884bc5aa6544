"""Rules that clean up a graph, one file for each family. Each states its premise and its proof in its docstring.

``python -m benchmarks.attack.cleaning`` draws graphs against all of them and compares bits.
"""
