"""The page of `lr-attnres explore` as a Hugging Face Space; the Space's variable MODELS names one model, or two."""

import os
import sys


models = os.environ.get("MODELS", "").split()
if not models:
    sys.exit("Set the variable MODELS of this Space to the repository of a model (or of two, to compare them).")

from lr_attnres.explore import explore  # noqa: E402


explore(models, host=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
