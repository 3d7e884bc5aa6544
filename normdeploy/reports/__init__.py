"""Write a verb's results as JSON, as tables for the terminal, and as a page."""
