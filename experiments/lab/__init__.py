"""The lab: a queue of experiments, jobs as data, worked off on whatever machine is at hand."""
