"""What would become of the norms of a model, and what runtimes make of them."""
