"""Test the migration of γ and β into linear layers on lookalikes; see ``__main__``."""
