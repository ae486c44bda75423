"""A queue of experiments, worked off one by one: every job is data, and its result one JSON file."""
