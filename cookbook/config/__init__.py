"""The files that users write: recipes and strategies, as typed and validated objects."""
