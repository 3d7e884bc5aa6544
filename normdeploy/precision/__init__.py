"""Convert a file to half precision, and choose the nodes that stay float32, each with a reason."""
