"""`lr-attnres explore` as a Hugging Face Space. The variable MODELS of the Space names one or two models."""

import os
import sys


models = os.environ.get("MODELS", "").split()
if not models:
    sys.exit("Set the variable MODELS of this Space to one model repository, or to two to compare them.")

from lr_attnres import explore  # noqa: E402


explore(models, host=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
