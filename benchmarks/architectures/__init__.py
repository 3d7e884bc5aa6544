"""Real architectures with random weights through every verb, and the time of their export beside the bare
exporter's."""
