"""`pando doctor`: is this machine ready to run Pando, and if not, what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from cluster.cli.cluster_checks import check_grpc_port, check_http_port, check_index, check_model
from cluster.cli.config import ConfigOption, SetOption
from cluster.cli.finding import Finding, Verdict
from cluster.cli.machine_checks import (
    CHECKED_PACKAGES,
    available_memory_bytes,
    check_disk,
    check_gpu,
    check_memory,
    check_namesake,
    check_package,
    check_python,
    own_requirements,
)
from cluster.cli.output import Output, OutputOption, console, show_json
from cluster.config import ClusterConfig, ConfigError, load_config

_verdict_to_mark = {Verdict.OK: "✓", Verdict.NOTE: "•", Verdict.FAILED: "✗"}


def doctor(
    config: ConfigOption = None, set_: SetOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Check this machine: versions, GPU, ports, configuration, Redis, model, disk, memory."""
    is_text = output is Output.TEXT
    findings = []
    for finding in examine(config_findings(config, set_ or ())):
        findings.append(finding)
        if is_text:
            # At once: the GPU takes seconds.
            console().print(_line(finding))
    num_failed = sum(finding.verdict is Verdict.FAILED for finding in findings)
    if is_text:
        console().print(_conclusion(num_failed))
    else:
        checks = [asdict(finding) for finding in findings]
        show_json({"is_ready": not num_failed, "checks": checks})
    raise typer.Exit(1 if num_failed else 0)


def config_findings(path: Path | None, overrides: Sequence[str]) -> tuple[Finding, ClusterConfig]:
    """Whether the configuration is valid, and it; when it is not, the defaults, for the other checks."""
    try:
        config = load_config(path, overrides=overrides)
    except ConfigError as error:
        advice = "mend it; the checks below use the defaults"
        finding = Finding("config", Verdict.FAILED, str(error).replace("\n", "; "), advice)
        return finding, ClusterConfig()
    shown = str(path) if path else "defaults"
    return Finding("config", Verdict.OK, shown), config


def examine(configured: tuple[Finding, ClusterConfig]) -> Iterator[Finding]:
    """All checks, the quick ones first."""
    config_finding, config = configured
    yield check_python()
    requirements = own_requirements()
    for name in CHECKED_PACKAGES:
        yield check_package(name, requirements)
    yield check_namesake()
    yield config_finding
    http = check_http_port(config)
    yield http
    yield check_grpc_port(config, is_running=http.verdict is Verdict.NOTE)
    yield check_index(config)
    model = check_model(config)
    yield model.finding
    yield check_disk(config)
    yield check_memory(config, model.weights_bytes, available_memory_bytes())
    yield check_gpu(config)


def _line(finding: Finding) -> str:
    advice = f"\n    → {finding.advice}" if finding.advice else ""
    return f"{_verdict_to_mark[finding.verdict]} {finding.name:<13}{finding.found}{advice}"


def _conclusion(num_failed: int) -> str:
    if not num_failed:
        return "\nReady."
    return f"\n{num_failed} {'thing needs' if num_failed == 1 else 'things need'} mending."
