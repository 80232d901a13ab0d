"""Check a model folder and show the files and the model card that `lr-attnres push` would upload. No account needed.

python examples/publish_model.py [FOLDER]      (without FOLDER: a tiny random model)
"""

import sys
import tempfile

from tiny_model import save_tiny_model

from lr_attnres import LRAttnResConfig, push
from lr_attnres.folders.card import model_card, write_provenance


def main(folder: str) -> None:
    push(folder, "owner/name", dry_run=True)
    print("\nThe card:\n")
    print(model_card(folder, LRAttnResConfig.from_pretrained(folder), "name", "owner/name"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_tiny_model(folder)
            # Facts for the card that `push` cannot find in the weights. `train`, `convert` and `upgrade` record them.
            write_provenance(folder, license="apache-2.0", language=["en"], recipe={"weights": "random"})
            main(folder)
