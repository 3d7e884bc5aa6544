"""Files and folders: read without trust, written whole or not at all, and what a file says of its own making."""
