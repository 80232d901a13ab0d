"""Low-Rank Attention Residuals: depth-routed decoders as a Hugging Face Transformers model.

Every public name can be imported from here; `__init__.pyi` lists them. A name's module is imported when the name is
first used.
"""

from .lazy_names import lazy_names, names_in_stub
from .registration import register_when_imported


__version__ = "0.2.0"

__getattr__, __all__ = lazy_names(__name__, names_in_stub(__file__))

register_when_imported()
