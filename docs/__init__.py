"""Pages, and the modules that write, refresh and draw them."""

# With this file, mypy reads the module reference.py before the folder reference/.
