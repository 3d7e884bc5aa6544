"""Change single lines, one at a time, and check that the tests of their subject notice."""
