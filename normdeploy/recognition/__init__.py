"""Find the norms in a graph.

The structure of the graph proposes an input and an output of a norm. The nodes between them are then evaluated, and the
values decide whether they compute a norm, and which one.
"""
