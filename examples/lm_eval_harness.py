"""Evaluate a model folder with lm-evaluation-harness on a small custom task.

    pip install ".[eval]"
    python examples/lm_eval_harness.py [FOLDER]      (without FOLDER: a tiny random model)

`import lr_attnres` registers the model with the Auto classes, which the harness uses. The harness's own command line
loads models from the Hub as remote code:
`lm_eval --model hf --model_args pretrained=owner/name,trust_remote_code=True --tasks lambada_openai`.
"""

import json
import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_model import save_tiny_model

import lr_attnres  # noqa: F401  (registers the Auto classes)


QUESTIONS = [
    {"text": "The sea is", "choices": [" blue", " made of wood"], "answer": 0},
    {"text": "Two and two are", "choices": [" seven", " four"], "answer": 1},
    {"text": "A cat has", "choices": [" four legs", " nine wheels"], "answer": 0},
    {"text": "Snow is", "choices": [" hot", " cold"], "answer": 1},
]
TASK = """
task: common_sense
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def evaluate(folder: str, work: Path) -> dict:
    """The accuracy, and the index of the chosen answer of each question. `work` gets the files of the task."""
    (work / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (work / "common_sense.yaml").write_text(TASK % json.dumps(str(work / "questions.jsonl")))
    model = HFLM(pretrained=folder, backend="causal", device="cpu", batch_size=2)
    tasks = TaskManager(include_path=str(work), include_defaults=False)
    results = simple_evaluate(model, tasks=["common_sense"], task_manager=tasks, bootstrap_iters=0)
    chosen = [
        max(range(2), key=lambda i, sample=sample: sample["filtered_resps"][i][0])
        for sample in sorted(results["samples"]["common_sense"], key=lambda sample: sample["doc_id"])
    ]
    return {"accuracy": results["results"]["common_sense"]["acc,none"], "chosen": chosen}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        folder = sys.argv[1] if len(sys.argv) > 1 else f"{work}/model"
        if len(sys.argv) == 1:
            save_tiny_model(folder)
        print(json.dumps(evaluate(folder, Path(work))))
