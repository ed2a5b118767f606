"""Grading and evaluation."""

from .grading import accuracy_reward, extract_boxed, grade, grade_many

__all__ = ["accuracy_reward", "extract_boxed", "grade", "grade_many"]
