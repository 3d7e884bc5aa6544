"""The verbs from Python, a file for each: one function that is read top to bottom and names every stage once.

`normdeploy` itself offers them (`normdeploy.export`, ...). What a verb is beyond its stages stands in the folders that
it calls.
"""
