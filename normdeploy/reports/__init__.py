"""What a verb did, as JSON, as tables for the terminal, and as a page."""
