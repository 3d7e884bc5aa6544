"""Change single lines of the code, one at a time, and check that a test fails."""
