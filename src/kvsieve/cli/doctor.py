"""``kvsieve doctor``: is the vLLM plug-in there, and is sparse decode really on?"""

from __future__ import annotations

import typer

from kvsieve.cli import declared
from kvsieve.cli.json_output import print_json
from kvsieve.integrations.vllm.doctor import Finding, examine, examine_server

FAILED = 1


def doctor_command(
    url: str | None = typer.Option(None, help="a running server, such as http://localhost:8000"),
    as_json: bool = declared.AS_JSON,
) -> int:
    """Check the vLLM plug-in, and with --url that a server decodes sparsely. Exit code 1 if something is missing."""
    findings = examine()
    if url is not None:
        findings.append(examine_server(url))
    good = all(finding.good for finding in findings)
    if as_json:
        print_json("doctor", {"passed": good, "checks": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            print(line(finding))
    return 0 if good else FAILED


def line(finding: Finding) -> str:
    """A finding as a line of text."""
    return f"{'ok  ' if finding.good else 'FAIL'}  {finding.what}: {finding.found}"
