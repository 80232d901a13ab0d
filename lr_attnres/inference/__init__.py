"""Inference with a saved model: print text in the terminal, or serve an OpenAI-compatible API."""

from ..lazy_names import lazy_names


__getattr__, __all__ = lazy_names(__name__, {"generate": ("generate_text",), "server": ("check_address", "serve")})
