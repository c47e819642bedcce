"""A client that sends overlapping requests to a server of vLLM and compares each answer with the request run alone.

    python tests/vllm_client.py http://localhost:8000 --requests 50 --least 200 --most 4000 --new 32

Prints one JSON object: answers equal, answers that part at a near-tie (both tokens nearly as likely), and the worst
difference of log-probabilities before they part; exit code 1 if an answer parts elsewhere, or if blocks stay in use.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NEAR_TIE = 0.15
TEXT = Path(__file__).parent.parent / "examples" / "jargon.txt"


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.load(answer)


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def ask(url: str, model: str, prompt: list[int], new: int) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    choice = post(url, "/v1/completions", body)["choices"][0]
    return {"tokens": choice["token_ids"], "best": choice["logprobs"]["top_logprobs"], **choice["logprobs"]}


def compare(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, float]:
    """``equal``, ``near-tie`` or ``different``, and the worst difference of log-probabilities up to there."""
    worst = 0.0
    for place, (mine, yours) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        if mine != yours:
            best = sorted(one["best"][place].values(), reverse=True)
            return ("near-tie" if best[0] - best[1] <= NEAR_TIE else "different"), worst
        worst = max(worst, abs(one["token_logprobs"][place] - other["token_logprobs"][place]))
    return "equal", worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    for name, default in (("--requests", 50), ("--least", 200), ("--most", 4000), ("--new", 32), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    url, draw = options.url.rstrip("/"), random.Random(options.seed)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    text = post(url, "/tokenize", {"model": model, "prompt": TEXT.read_text(encoding="utf-8")})["tokens"] * 3
    prompts = []
    for _ in range(options.requests):
        start = draw.randrange(3000)
        prompts.append(text[start : start + draw.randint(options.least, options.most)])
    before = metric(url, "vllm:kv_cache_usage_perc")
    begun = time.time()
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: ask(url, model, prompt, options.new), prompts))
    middle = time.time()
    alone = [ask(url, model, prompt, options.new) for prompt in prompts]
    verdicts = [compare(one, other) for one, other in zip(alone, together, strict=True)]
    time.sleep(2)
    after = metric(url, "vllm:kv_cache_usage_perc")
    result = {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        **{kind: sum(found == kind for found, _ in verdicts) for kind in ("equal", "near-tie", "different")},
        "worst_logprob_difference": round(max(worst for _, worst in verdicts), 4),
        "seconds_together": round(middle - begun, 1),
        "seconds_alone": round(time.time() - middle, 1),
        "cache_usage_before": before,
        "cache_usage_after": after,
        "sparse_tokens": metric(url, "kvsieve_sparse_rows_total"),
    }
    print(json.dumps(result))
    return int(bool(result["different"]) or after != before)


if __name__ == "__main__":
    sys.exit(main())
