"""Run many models for many targets as a graph of steps. A store keeps the results of the steps.

A step is one call of a verb in its own folder. The step's key is the hash of everything that the step depends on. A
step whose key is in the store is not run again. `normdeploy.fleet.scheduler` runs the graph. The process that runs the
graph is called the driver.
"""
