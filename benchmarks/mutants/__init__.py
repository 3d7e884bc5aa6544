"""Single lines changed, one at a time, and whether the tests of their subject notice."""
