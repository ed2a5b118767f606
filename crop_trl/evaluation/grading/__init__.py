"""Whether a response's final answer is right; frozen, see `verdict.py`."""

from .verdict import accuracy_reward, grade
