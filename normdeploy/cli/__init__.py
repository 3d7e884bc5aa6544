"""Verbs of the command line, one file each. A verb parses its arguments, calls its stage and prints the result. Heavy
libraries are imported only when a verb runs.
"""
