"""What follows from a recipe and a strategy: batches, costs, conflicts, launch commands. No torch."""
