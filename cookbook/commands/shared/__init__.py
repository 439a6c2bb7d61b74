"""Parts that several commands share: their arguments, the labels of recipes, and the reading of a run's folder."""
