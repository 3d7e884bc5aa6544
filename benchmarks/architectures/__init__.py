"""Run real architectures with random weights through every verb.

The time of their export is compared with the time of torch's exporter.
"""
