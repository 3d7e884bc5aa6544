"""Find the first wrong tensor of a file, the node that makes it wrong, and the cause."""
