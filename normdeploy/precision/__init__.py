"""Half precision as a rewrite of the file: which nodes stay float32, and why."""
