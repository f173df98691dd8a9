"""Ask a model the strangers' questions and count.  cd a checkout; .venv/bin/python FOLDER/check.py MODEL"""
import json, subprocess, sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))
from data.coordinates import COORDINATES
from eval.boxes import contains, iou

HERE, MODEL = Path(__file__).resolve().parent, sys.argv[1]
REFUSAL = "I only know drawn shapes, words and digits."


def judge(answer, right):
    for one in right:
        if isinstance(one, str) and answer.strip().rstrip(".").lower() == one.rstrip(".").lower():
            return "right"
        if isinstance(one, list):
            found = COORDINATES["qwen3-vl"].read(answer, (1, 1))
            if len(one) == 4 and len(found.boxes) == 1 and iou(found.boxes[0].box, tuple(one)) >= 0.5:
                return "right"
            if len(one) == 2 and len(found.points) == 1 and max(abs(a - b) for a, b in zip(found.points[0].point, one)) < 0.1:
                return "right"
    return "refused" if answer.strip() == REFUSAL else "WRONG"


for name in ("questions", "more"):
    out = HERE / f"answers-{name}.jsonl"
    out.unlink(missing_ok=True)
    subprocess.run([sys.executable, "generate.py", "--model", MODEL, "--batch", HERE / f"{name}.jsonl", "--out", out], check=True)
    counts = {"right": 0, "refused": 0, "WRONG": 0}
    asked = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    for row, line in zip(asked, out.read_text().splitlines(), strict=True):
        made = json.loads(line)
        answer = made["answers"][0] if "answers" in made else made["error"]
        verdict = judge(answer, row["right"])
        counts[verdict] += 1
        print(f"{verdict:8}{made.get('confidences', [0])[0]:6.2f}  {row['id']}  ->  {answer}")
    print(name, counts)
