"""Define the records of findings, certificates and summaries, and print them as tables."""
