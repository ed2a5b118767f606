"""Figures and tables of what a method keeps: data first, then a picture."""
