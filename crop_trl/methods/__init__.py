"""Which tokens are kept: the table of methods and what it is made of. Tensors in, tensors out, no model."""

from .context import SelectionContext, SelectionSettings, Signals, TopKLogprobs
from .table import METHODS, Method, Selection, get_method, register_method, select, settings_of
