"""Forecasts a recipe, or a model and a method, under every strategy or on any GPUs."""
