"""Grading and evaluation."""
