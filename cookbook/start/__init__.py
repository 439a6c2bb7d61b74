"""The start of a run, without torch: launchers and hosts, the plan of processes and batches, and what is refused."""
