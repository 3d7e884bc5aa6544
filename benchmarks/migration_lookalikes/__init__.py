"""Graphs that look as if a norm's γ and β could move into the linear layers after it: see ``__main__``."""
