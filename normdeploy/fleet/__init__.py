"""Many models, many targets: what is to be made of them is a graph of steps, and what a step made is kept in a store.

A step is one call of a verb in a folder of its own. Its key is the hash of all that it depends on; a step whose key is
in the store is not run again. ``run`` is the whole of it (`normdeploy.fleet.scheduler`).
"""
