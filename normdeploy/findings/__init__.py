"""Plain data of findings, certificates and summaries, and how they are rendered."""
