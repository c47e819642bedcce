"""``kvsieve doctor``: is the vLLM plug-in there, and is sparse decode really on?"""

from __future__ import annotations

import json

import typer

from kvsieve.integrations.vllm.doctor import Finding, examine, examine_server

FAILED = 1


def doctor_command(
    url: str | None = typer.Option(None, help="a running server, such as http://localhost:8000"),
    as_json: bool = typer.Option(False, "--json", help="print a JSON array, an object per check"),
) -> int:
    """Check the vLLM plug-in, and with --url that a server decodes sparsely. Exit code 1 if something is missing."""
    findings = examine()
    if url is not None:
        findings.append(examine_server(url))
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    else:
        for finding in findings:
            print(line(finding))
    return 0 if all(finding.good for finding in findings) else FAILED


def line(finding: Finding) -> str:
    """A finding as a line of text."""
    return f"{'ok  ' if finding.good else 'FAIL'}  {finding.what}: {finding.found}"
