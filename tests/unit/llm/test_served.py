"""The section `models` of omniserve.yaml: what it makes, and how it is refused."""

from pathlib import Path

import pytest

from services.kit.config import ConfigError
from services.llm.adapters.model_file import default_path
from services.llm.core.catalogue import Kind
from services.llm.core.embed_wire import EmbedConfig
from services.llm.served import Served, read_served
from services.llm.settings import LlmSettings


def read(tmp_path: Path, text: str, **settings: object) -> tuple[Served, ...]:
    file = tmp_path / "omniserve.yaml"
    file.write_text(text.replace("SMOL", str(default_path())))
    return read_served(LlmSettings(**{"config": file, "embedding_gguf": "none"} | settings))  # type: ignore[arg-type]


def faults(tmp_path: Path, text: str, **settings: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **settings)
    return [f"{fault.line}: {fault.setting}: {fault.message}" for fault in caught.value.faults]


def test_without_the_section_the_one_model_of_the_settings_is_served(tmp_path: Path) -> None:
    (only,) = read(tmp_path, "keys: []\n")
    assert only.entry.name == "SmolLM2-135M-Instruct"
    assert (only.pinned, only.preload, only.ttl_s) == (True, True, 0)
    assert only.system == "Answer questions correctly."
    assert only == read_served(LlmSettings(embedding_gguf="none"))[0]


def test_a_model_takes_the_service_s_settings_where_it_has_none_of_its_own(tmp_path: Path) -> None:
    first, second = read(
        tmp_path,
        """
        models:
          - {name: plain, path: SMOL}
          - name: own
            path: SMOL
            aliases: [a, b]
            sampling: {temperature: 0.2, top_k: 5}
            system: Be brief.
            ctx: 512
            request_ctx: 300
            contexts: 2
            warm_prefixes: 1
            ngl: 0
            kv_type: q8_0
            threads: 1
            ttl_s: 60
            pin: true
            preload: true
        """,
        ctx=1024,
        top_p=0.9,
    )
    assert (first.chat.context_cells, first.chat.slots, first.chat.gpu_layers) == (1024, 16, None)
    assert (first.sampling.temperature, first.sampling.top_p, first.system) == (1.0, 0.9, None)
    assert (first.ttl_s, first.pinned, first.preload) == (0, False, False)
    assert second.entry.names == ("own", "a", "b")
    assert second.entry.kind is Kind.CHAT
    assert (second.sampling.temperature, second.sampling.top_p, second.sampling.top_k) == (0.2, 0.9, 5)
    engine = second.chat
    assert (engine.context_cells, engine.context_tokens, engine.slots, engine.warm_sequences) == (512, 300, 2, 1)
    assert (engine.gpu_layers, engine.tuning.kv_type, engine.threads) == (0, "q8_0", 1)
    assert second.context_tokens == 300
    assert (second.ttl_s, second.pinned, second.preload, second.system) == (60, True, True, "Be brief.")
    assert first.need_mib > second.need_mib, "a smaller cache of smaller numbers"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(default_path())
    (only,) = read(tmp_path, "models: [{name: m, path: m.gguf}]")
    assert only.file.path == default_path().resolve()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "models:\n- {name: m, path: SMOL, alias: [x]}",
            "2: models[0].alias: no such setting; did you mean `aliases`?",
        ),
        ("models:\n- name: m", "2: models[0]: needs `path`"),
        (
            "models:\n- {name: m, path: SMOL}\n- {name: m, path: SMOL}",
            "3: models[1].name: 'm' is a name of 'm' already",
        ),
        (
            "models:\n- {name: m, path: SMOL}\n- name: n\n  path: SMOL\n  aliases: [m]",
            "5: models[1].aliases: 'm' is a name of 'm' already",
        ),
        ("models:\n- {name: m, path: none.gguf}", "2: models[0].path: TMP/none.gguf: No such file or directory"),
        ("models:\n- {name: m, path: omniserve.yaml}", "2: models[0].path: TMP/omniserve.yaml: no GGUF file"),
        ("models:\n- {name: m, path: SMOL, ctx: 5}", "2: models[0].ctx: input should be greater than or equal to 16"),
        (
            "models:\n- {name: m, path: SMOL, ctx: 99}",
            "2: models[0]: has `ctx` 99; a model that generates text needs 256",
        ),
        (
            "models:\n- {name: m, path: SMOL, pooling: cls}",
            "2: models[0]: has `pooling`, which is for models that make",
        ),
        ("models:\n- {name: m, path: SMOL, contexts: 9, warm_prefixes: 255}", "2: models[0]: OMNISERVE_LLM_CONTEXTS"),
        (
            "models:\n- name: m\n  path: SMOL\n  sampling: {top_p: 0}",
            "4: models[0].sampling.top_p: input should be greater than 0",
        ),
        (
            "models:\n- {name: m, path: SMOL, kind: rerank}",
            "2: models[0]: is of kind rerank, but its file pools by nothing",
        ),
        (
            "models:\n- {name: m, path: SMOL, kind: embedding, system: x}",
            "2: models[0]: is of kind embedding and has `system`",
        ),
        ("models:\n- {name: 'a  b', path: SMOL}", "2: models[0].name: "),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, fault: str) -> None:
    found = [each.replace(str(tmp_path), "TMP") for each in faults(tmp_path, text)]
    assert len(found) == 1
    assert found[0].startswith(fault), found[0]


def test_a_model_file_in_the_settings_and_models_in_the_file_exclude_each_other(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "models:\n- {name: m, path: SMOL}", gguf=default_path())
    assert fault == "1: models: and OMNISERVE_LLM_GGUF both say what is served; keep one of them"


def test_models_that_the_memory_is_too_small_for_are_refused_at_once(tmp_path: Path) -> None:
    one = "models:\n- {name: a, path: SMOL, ctx: 1024, pin: true}\n- {name: b, path: SMOL, ctx: 1024}"
    (first, _) = read(tmp_path, one, memory_mib=1000)
    need = first.need_mib
    (fault,) = faults(tmp_path, one, memory_mib=2 * need - 1)
    assert (
        fault
        == f"3: models[1]: needs {need} MiB; OMNISERVE_LLM_MEMORY_MIB is {2 * need - 1}, pinned models leave {need - 1}"
    )
    both = one.replace("pin: true", "preload: true").replace("1024}", "1024, preload: true}")
    assert "those to preload need" in faults(tmp_path, both, memory_mib=2 * need - 1)[-1]


def test_memory_that_is_too_small_for_the_model_of_the_settings_is_refused_at_once(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "keys: []", memory_mib=50)
    assert fault.startswith("None: OMNISERVE_LLM_MEMORY_MIB: is 50; the models of the settings, which stay, need")


def test_models_that_run_alike_need_no_new_host(tmp_path: Path) -> None:
    text = "models: [{name: m, path: SMOL}]"
    (before,) = read(tmp_path, text)
    (renamed,) = read(tmp_path, text.replace("}", ", aliases: [x], ttl_s: 5, sampling: {top_k: 3}}"))
    (larger,) = read(tmp_path, text.replace("}", ", ctx: 512}"))
    assert before.runs_like(renamed)
    assert not before.runs_like(larger)


def test_a_model_that_makes_vectors_takes_the_embedding_settings(tmp_path: Path) -> None:
    text = "models:\n- {name: talks, path: SMOL}\n- {name: vectors, path: SMOL, kind: embedding, pooling: last, ctx: 100, ttl_s: 9}"
    talks, vectors = read(tmp_path, text, embedding_threads=2)
    assert vectors.entry.kind is Kind.EMBEDDING
    assert isinstance(vectors.engine, EmbedConfig)
    assert (vectors.engine.pooling, vectors.engine.input_tokens, vectors.engine.threads) == ("last", 100, 2)
    assert (vectors.context_tokens, vectors.ttl_s, vectors.modality) == (100, 9, "embedding")
    assert talks.modality == "llm"
    assert vectors.need_mib < talks.need_mib, "it has no cache to speak of"
    with pytest.raises(TypeError):
        _ = vectors.chat


def test_the_settings_embedding_model_stands_beside_a_catalogue_that_has_none(tmp_path: Path) -> None:
    file = tmp_path / "vectors.gguf"
    file.symlink_to(default_path())
    talks, vectors = read(tmp_path, "models: [{name: talks, path: SMOL}]", embedding_gguf=str(file))
    assert (vectors.entry.kind, vectors.pinned, vectors.preload, vectors.required) == (
        Kind.EMBEDDING,
        True,
        True,
        False,
    )
    assert talks.entry.kind is Kind.CHAT
    both = "models:\n- {name: talks, path: SMOL}\n- {name: v, path: SMOL, kind: embedding}"
    (fault,) = faults(tmp_path, both, embedding_gguf=str(file))
    assert "both say what makes vectors" in fault


def test_a_draft_model_is_checked_and_its_memory_reckoned(tmp_path: Path) -> None:
    text = "models:\n  - {name: large, path: SMOL, draft: SMOL}\n  - {name: alone, path: SMOL}\n"
    large, alone = read(tmp_path, text, spec_draft=4)
    assert large.chat.draft_model is not None
    assert large.chat.draft_model.path in large.files
    assert alone.chat.draft_model is None
    assert large.need_mib == pytest.approx(2 * alone.need_mib, abs=1)
    assert large.profile != alone.profile
    assert not large.runs_like(alone)


def test_a_draft_model_that_cannot_draft_is_refused_with_the_reason(tmp_path: Path) -> None:
    text = "models:\n  - {name: large, path: SMOL, draft: SMOL}\n"
    assert "OMNISERVE_LLM_SPEC_DRAFT is 0" in faults(tmp_path, text)[0]
    assert "have each their own `draft`" in faults(tmp_path, text, spec_draft=4, spec_draft_gguf=default_path())[0]
