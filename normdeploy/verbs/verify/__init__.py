"""What runtimes make of files beside eager PyTorch, all against float64, and the verdict."""
