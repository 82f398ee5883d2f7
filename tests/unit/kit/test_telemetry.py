import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def lines_of(program: str, **variables: str) -> list[dict[str, object]]:
    """Run a program in a process of its own, since logging is global; return what it logged."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos/gen")])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "", "logs never go to stdout"
    return [json.loads(line) for line in done.stderr.splitlines()]


SETUP = """
import logging, threading, sys
from types import SimpleNamespace
from services.kit import telemetry
from services.kit.context import Request, set_current_request
def setup(level="info", endpoint=""):
    telemetry.setup_telemetry("llm", SimpleNamespace(log_level=level, otlp_endpoint=endpoint))
log = telemetry.logger("a.module")
"""


def test_a_log_line_is_one_json_object_with_service_logger_level_and_time():
    (line,) = lines_of(f"{SETUP}\nsetup(); log.info('loaded', model='m', layers=3)")
    assert (line["service"], line["logger"], line["level"], line["event"]) == ("llm", "a.module", "info", "loaded")
    assert (line["model"], line["layers"]) == ("m", 3)
    assert str(line["timestamp"]).endswith("Z")


def test_a_line_break_in_a_value_does_not_break_the_line():
    (line,) = lines_of(f"{SETUP}\nsetup(); log.info('said', text='a\\nb')")
    assert line["text"] == "a\nb"


def test_records_of_libraries_look_the_same_and_the_level_is_obeyed():
    lines = lines_of(f"{SETUP}\nsetup('warning'); log.info('no'); logging.getLogger('lib').warning('%s of %s', 1, 2)")
    assert [(line["logger"], line["event"], line["service"]) for line in lines] == [("lib", "1 of 2", "llm")]


def test_an_exception_is_logged_with_its_stack():
    (line,) = lines_of(f"""{SETUP}
setup()
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
""")
    assert "ZeroDivisionError" in str(line["exception"])


def test_with_tracing_off_there_is_no_thread_no_sdk_and_no_span_and_the_callers_trace_id_is_logged():
    (line,) = lines_of(f"""{SETUP}
setup()
set_current_request(Request("r1", "00-{"a" * 32}-{"b" * 16}-01"))
with telemetry.tracer("x").start_as_current_span("work") as span:
    assert not span.is_recording()
    log.info("inside", threads=threading.active_count(), tracing=telemetry.tracing(),
             sdk="opentelemetry.sdk.trace" in sys.modules)
""")
    assert (line["threads"], line["tracing"], line["sdk"]) == (1, False, False)
    assert line["trace_id"] == "a" * 32


def test_with_tracing_on_a_line_inside_a_span_carries_its_ids_and_a_line_outside_does_not():
    inside, outside = lines_of(f"""{SETUP}
setup("critical", "http://127.0.0.1:9")
logging.getLogger("a.module").setLevel("INFO")
with telemetry.tracer("x").start_as_current_span("work") as span:
    log.info("inside", want=format(span.get_span_context().trace_id, "032x"))
log.info("outside")
import os
os._exit(0)
""")
    assert inside["trace_id"] == inside["want"]
    assert len(str(inside["span_id"])) == 16
    assert "trace_id" not in outside


def test_without_set_up_nothing_is_printed_on_stdout():
    program = "from services.kit import telemetry\ntelemetry.logger('x').info('quiet')"
    assert lines_of(program) == []
