"""Files and engines run once, or held ready to run."""
