"""The lab: a queue of experiments that is worked off on whatever machine is at hand."""
