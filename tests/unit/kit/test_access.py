import pytest
from google.longrunning import operations_pb2  # noqa: F401 - a contract without access rules

from omniserve.admission.v1 import admission_pb2  # noqa: F401 - its rules are read below
from omniserve.llm.v1 import llm_pb2  # noqa: F401 - its rules are read below
from omniserve.options.v1 import options_pb2
from services.kit.access import Access, AccessRulesMissingError, refusal, rules_of

PUBLIC = Access(options_pb2.AUDIENCE_PUBLIC)
OPERATOR = Access(options_pb2.AUDIENCE_OPERATOR)
MESH = Access(options_pb2.AUDIENCE_MESH)
FACADE_ONLY = Access(options_pb2.AUDIENCE_MESH, frozenset({"facade"}))


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (PUBLIC, {"envoy-public", "envoy-operator", "cli", "llm", "facade"}),
        (OPERATOR, {"envoy-operator", "cli", "llm", "facade"}),
        (MESH, {"llm", "facade"}),
        (FACADE_ONLY, {"facade"}),
    ],
)
def test_each_audience_lets_in_exactly_its_callers(rule, allowed):
    everybody = {"envoy-public", "envoy-operator", "cli", "llm", "facade"}
    assert {caller for caller in everybody if refusal(rule, caller) is None} == allowed


def test_a_refusal_says_why():
    assert "PUBLIC" in (refusal(MESH, "envoy-public") or "")
    assert "facade" in (refusal(FACADE_ONLY, "llm") or "")


def test_rules_are_read_from_the_contracts():
    rules = rules_of(["omniserve.llm.v1.LlmService", "omniserve.llm.v1.LlmAdminService"])
    assert rules["/omniserve.llm.v1.LlmService/Chat"] == PUBLIC
    assert rules["/omniserve.llm.v1.LlmService/GenerateSession"] == FACADE_ONLY
    assert rules["/omniserve.llm.v1.LlmAdminService/SwapModel"] == OPERATOR


def test_every_rpc_without_a_rule_is_named():
    with pytest.raises(AccessRulesMissingError, match=r"google\.longrunning\.Operations/GetOperation"):
        rules_of(["omniserve.llm.v1.LlmService", "google.longrunning.Operations"])


def test_a_service_without_a_contract_is_named():
    with pytest.raises(AccessRulesMissingError, match=r"no\.such\.Service"):
        rules_of(["no.such.Service"])
