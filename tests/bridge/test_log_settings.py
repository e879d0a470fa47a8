"""`MASKBRIDGE_LOGS`, and where the records go."""

import logging
import sys

import pytest

from bridge import _logs

pytestmark = pytest.mark.quick


@pytest.fixture
def unconfigured(monkeypatch):
    """Give the loggers neither levels nor handlers for one test, and cut them off from pytest's handlers."""
    for log in (_logs.MASKBRIDGE, *map(_logs.MASKBRIDGE.getChild, _logs.NAMES)):
        monkeypatch.setattr(log, "handlers", [])
        monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr(_logs.MASKBRIDGE, "parent", None)
    logging.getLogger().manager._clear_cache()
    yield
    logging.getLogger().manager._clear_cache()


def test_names_are_split_at_commas():
    assert _logs.requested_logs({}) == ([], [])
    assert _logs.requested_logs({"MASKBRIDGE_LOGS": ""}) == ([], [])
    assert _logs.requested_logs({"MASKBRIDGE_LOGS": " plan,hlo ,, plan,HLO"}) == (["plan", "hlo"], ["HLO"])


@pytest.mark.usefixtures("unconfigured")
def test_variable_turns_on_the_named_logs_alone(monkeypatch):
    monkeypatch.setenv("MASKBRIDGE_LOGS", "plan,memory")
    _logs.configure()
    assert [log.name for log in (_logs.PLAN, _logs.JAXPR, _logs.HLO, _logs.RECOMPILES, _logs.MEMORY) if _logs.is_on(log)] == [
        "maskbridge.plan",
        "maskbridge.memory",
    ]


@pytest.mark.usefixtures("unconfigured")
def test_unknown_name_warns_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("MASKBRIDGE_LOGS", "recompile")
    with pytest.warns(
        UserWarning, match=r"names 'recompile', which is no log\. Did you mean 'recompiles'\? Known: hlo, jaxpr, memory, plan"
    ):
        _logs.configure()


@pytest.mark.usefixtures("unconfigured")
def test_level_that_was_set_before_the_import_stays(monkeypatch):
    monkeypatch.delenv("MASKBRIDGE_LOGS", raising=False)
    _logs.MASKBRIDGE.setLevel(logging.DEBUG)
    _logs.configure()
    assert _logs.is_on(_logs.HLO)


@pytest.mark.usefixtures("unconfigured")
def test_records_go_to_stderr_unless_another_handler_gets_them(monkeypatch, capsys):
    monkeypatch.setenv("MASKBRIDGE_LOGS", "plan")
    _logs.configure()
    _logs.PLAN.info("%d leaves", 3)
    assert capsys.readouterr().err == "maskbridge.plan: 3 leaves\n"
    seen = logging.Handler()
    seen.emit = lambda record: print(record.getMessage())
    monkeypatch.setattr(_logs.PLAN, "handlers", [seen])
    _logs.PLAN.info("%d leaves", 4)
    assert capsys.readouterr() == ("4 leaves\n", "")
    monkeypatch.setattr(_logs.PLAN, "handlers", [])
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    _logs.PLAN.info("%d leaves", 5)
