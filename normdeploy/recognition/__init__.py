"""What norms a graph holds: structure proposes where one begins and ends, values say which it is."""
