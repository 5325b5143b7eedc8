"""Prometheus's own programs, if this machine has them (Debian: prometheus), and the rules and the
dashboard of the folder monitoring.
"""

import json
import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from kafka2pc.proof.child_process import until

MONITORING = Path(__file__).resolve().parents[2] / "nbs" / "guide" / "monitoring"
RULES = MONITORING / "alerts.yml"


def program(name):
    """The path of promtool or prometheus; skips the test without it."""
    found = shutil.which(name)
    if not found:
        pytest.skip(f"needs {name} (Debian: prometheus)")
    return found


def rules():
    """The alert rules: name -> expression."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels():
    """The expressions of the dashboard, with all variables filled in: (title, expression)."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    filled = lambda text: text.replace("$__rate_interval", "30s").replace("$query", ".*")
    return [(p["title"], filled(t["expr"])) for p in board["panels"] for t in p["targets"]]


def names(expression):
    """The metrics in an expression, as they are scraped."""
    return set(re.findall(r"\bkafka2pc_\w+", expression))


def series(sample, minutes, step=0):
    """A sample as an input of promtool, once a minute; `step`: how it grows."""
    labels = ",".join(f'{name}="{text}"' for name, text in sample.labels)
    key = f"{sample.family}{sample.suffix}{{{labels}}}"
    values = f"{sample.value:.3f}{step:+d}x{minutes}".replace("inf", "Inf")
    return {"series": key, "values": values}


def firing(inputs, minutes, folder):
    """Which alerts fire at each of these minutes: minute -> names. promtool evaluates the rules
    over the inputs; it prints each alert that is not among the samples that were expected, none.
    """
    tool = program("promtool")
    shutil.copy(RULES, folder / "alerts.yml")
    tests = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
            "eval_time": f"{minute}m",
            "exp_samples": [],
        }
        for name in rules()
        for minute in minutes
    ]
    case = {"interval": "1m", "input_series": inputs, "promql_expr_test": tests}
    whole = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": [case]}
    path = folder / "cases.yml"
    path.write_text(yaml.safe_dump(whole))
    done = subprocess.run([tool, "test", "rules", path], capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert "FAILED" in text or "SUCCESS" in text, text
    found = re.findall(r'alertname=\\?"(\w+)\\?".*?time: (\w+),', text)
    return {m: {name for name, at in found if seconds(at) == 60 * m} for m in minutes}


def seconds(text):
    """A duration of Prometheus: 1h5m."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(n) * units[unit] for n, unit in re.findall(r"(\d+)([hms])", text))


@contextmanager
def prometheus(folder, port, seconds=True):
    """A server that scrapes the endpoint at this port every second. Yields a function that asks an
    expression. `seconds`: the rules wait for seconds instead of minutes.
    """
    server = program("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    text = RULES.read_text()
    waits = re.sub(r"for: (\d+)m", r"for: \1s", text) if seconds else text
    (folder / "rules.yml").write_text(waits)
    job = {"job_name": "kafka2pc", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [server, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/db"]
    command.append(f"--web.listen-address=127.0.0.1:{own}")
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def ask(expression):
        url = f"http://127.0.0.1:{own}/api/v1/query?{urlencode({'query': expression})}"
        return json.load(urlopen(url))["data"]["result"]

    def ready():
        try:
            return urlopen(f"http://127.0.0.1:{own}/-/ready").status == 200
        except OSError:
            return False

    try:
        until(ready, "prometheus is ready")
        yield ask
    finally:
        process.kill()
        process.wait(30)
