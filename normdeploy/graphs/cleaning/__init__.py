"""Rules that clean up a graph, one file per family. Each docstring states the rule's premise and proof.

``python -m benchmarks.attack.cleaning`` runs all rules on random graphs and compares the outputs bit by bit.
"""
