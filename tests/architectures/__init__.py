"""Real architectures with random weights through the whole pipeline; deselected by default, run by `make
test-architectures`."""
