"""Recipes: a model, a layout, sampling and a prompt in one YAML file; each hangs on the outside of `generate`."""
