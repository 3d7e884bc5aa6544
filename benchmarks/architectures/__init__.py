"""Run real architectures with random weights through every verb, and compare the time of their export with the bare
exporter's.
"""
