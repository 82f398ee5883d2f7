"""What an answer has to obey, of everything that a request asks of its form: structure, calls, and room for thoughts."""

from functools import lru_cache

from services.kit.errors import DomainError, Reason
from services.llm.core.dialect import OPENINGS, Dialect, ToolFormat
from services.llm.core.gbnf import GrammarSizeError, Rules, either, literal, through
from services.llm.core.structure import Structure, StructureKind, grammar_of, structure_symbol
from services.llm.core.toolbox import Toolbox
from services.llm.core.tools import call_grammar
from services.llm.core.wire import Constraint

_SPACE = '"\\n"{0,2}'


@lru_cache(maxsize=64)
def constraint_of(
    structure: Structure | None, box: Toolbox, dialect: Dialect | None, *, inside: bool, may_think: bool
) -> Constraint | None:
    """Return what the output has to obey, None for nothing.

    `dialect`: None for a completion, which has no template. `inside`: the prompt ends inside of thoughts; `may_think`: the
    model may begin some. Raises DomainError that names the field.
    """
    thinking = None if dialect is None else dialect.thinking
    thoughts = None if thinking is None else (thinking.opening, thinking.closing)
    offered = bool(box.offered) and dialect is not None
    field = "tools" if offered else "options.structure" if structure is None else structure.field
    if structure is not None and structure.kind is StructureKind.GRAMMAR:
        if offered:
            raise DomainError(
                Reason.INVALID_REQUEST, f"'{structure.field}' cannot be combined with 'tools'", field=structure.field
            )
        return Constraint(grammar_of(structure), field, thoughts=thoughts, inside=inside)
    rules = Rules()
    try:
        body = None if structure is None else structure_symbol(rules, structure)
        if offered and dialect is not None:
            calls = call_grammar(rules, box, dialect.format)
            if body is None and not box.forced:
                anchored = dialect.format is ToolFormat.BARE
                return Constraint(rules.text(calls.rest), field, OPENINGS[dialect.format], anchored, thoughts, inside)
            body = calls.whole if body is None or box.forced else either((body, calls.whole))
        if body is None:
            return None
        if thinking is not None and (inside or may_think):
            body = f"{_SPACE} {body}"
            if not inside:
                block = f"{literal(thinking.opening)} {through(rules, thinking.closing)}"
                body = f"({block})? {body}"
        return Constraint(rules.text(body), field, thoughts=thoughts, inside=inside)
    except GrammarSizeError as error:
        raise DomainError(Reason.INVALID_REQUEST, f"'{field}' is too large: {error}", field=field) from None
