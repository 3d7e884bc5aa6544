"""Plain data of findings, certificates and summaries, and their tables."""
