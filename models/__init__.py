"""Normalizations that must deploy: every row of the project's table, their spellings, lookalikes and small nets.

Imports torch alone. ``models.registry`` lists everything as data; each module holds one family.
"""
