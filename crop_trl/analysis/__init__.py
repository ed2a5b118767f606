"""Figures and tables of what a method selects: data first, then a picture."""
