"""Whole programs: models, recipes, frameworks on several processes."""
