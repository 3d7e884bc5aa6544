"""Run many models for many targets as a graph of steps, whose results are kept in a store.

A step is one call of a verb in its own folder. The step's key is the hash of everything that the step depends on. A
step whose key is in the store is not run again. `normdeploy.fleet.scheduler` runs the graph. The process that does this
is called the driver.
"""
