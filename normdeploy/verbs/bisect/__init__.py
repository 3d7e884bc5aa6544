"""Where a wrong file goes wrong: the first tensor, the node, the likely cause, a reproduction."""
