"""Grading and evaluation."""

from .grading import accuracy_reward, grade
from .grading.verdict import extract_boxed, grade_many
