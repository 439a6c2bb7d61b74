"""`convert`: files of other projects become a recipe and a strategy. No torch."""
